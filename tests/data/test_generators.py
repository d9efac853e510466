"""Generated prompt records: reproducible, different from each other, never held out, in the contract's form."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_prorl import settings
from nemo_prorl.config import DataSource
from nemo_prorl.data.laptop.generators import generate, warmup_target
from nemo_prorl.data.records import validate_record
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.sizing.memory import SMALL

DATASETS = ["chain_sum", "spell_backward", "gcd", "leg_counting", "rearc", "family_relationships", "mini_sudoku"]


def source(generator: str, size: int | None = 20, seed: int = 0, **options: Any) -> DataSource:
    return DataSource(name=generator.split(":")[-1], generator=generator, size=size, seed=seed, options=options)


@pytest.mark.parametrize("dataset", DATASETS)
def test_reasoning_gym_records_follow_the_contract(dataset: str) -> None:
    records = generate(source(f"reasoning_gym:{dataset}", size=8))
    assert len({record["id"] for record in records}) == len({record["prompt"] for record in records}) == 8
    assert records[0]["id"] == f"{dataset}-0"
    for record in records:
        assert validate_record(json.loads(json.dumps(record)), "here") == record
        assert set(record) == {"id", "task", "prompt", "truth", "source", "meta"}
        assert (record["task"], record["source"], record["truth"]["dataset"]) == ("puzzles", dataset, dataset)
        assert set(record["truth"]["entry"]) >= {"question", "answer", "metadata"}
        assert record["prompt"].startswith(record["truth"]["entry"]["question"].strip())
        assert record["prompt"].count("Answer in <answer></answer>.") == 1


@pytest.mark.parametrize("dataset", ["chain_sum", "spell_backward", "gcd", "leg_counting"])
def test_warmup_target_earns_the_full_reward(dataset: str) -> None:
    from reasoning_gym.factory import create_dataset

    scorer = create_dataset(dataset, seed=1, size=1)
    for record in generate(source(f"reasoning_gym:{dataset}")):
        target = warmup_target(record)
        answer = target.removeprefix("<answer>").removesuffix("</answer>")
        assert target == f"<answer>{answer}</answer>"
        assert scorer.score_answer(answer, record["truth"]["entry"]) == 1.0


def test_same_source_same_records_and_another_seed_others() -> None:
    first, again = (generate(source("arithmetic", seed=4)) for _ in range(2))
    assert first == again
    assert [r["prompt"] for r in generate(source("arithmetic", seed=5))] != [r["prompt"] for r in first]
    gym = source("reasoning_gym:chain_sum", seed=4)
    assert generate(gym) == generate(gym)


def test_arithmetic_answers_are_right() -> None:
    records = generate(source("arithmetic", size=400, max_values=[12, 20, 5], operators="+-*"))
    for record in records:
        validate_record(record, "here")
        expression = record["prompt"].removesuffix(".\nAnswer in \\boxed{}.").removeprefix("Compute ")
        value = eval(expression)  # our own digits and signs; Python's precedence is the reference
        assert record["truth"] == {"answer": str(value)}
        assert record["task"] == "math"
        assert warmup_target(record) == f"\\boxed{{{value}}}"
    assert {sign for record in records for sign in "+-*" if f" {sign} " in record["prompt"]} == set("+-*")


def test_held_out_prompts_are_replaced_and_ids_stay() -> None:
    wanted = source("arithmetic", size=50)
    free = generate(wanted)
    held_out = {free[3]["prompt"], free[10]["prompt"]}
    kept = generate(wanted, held_out)
    assert len(kept) == 50
    assert not held_out & {record["prompt"] for record in kept}
    assert kept[:48] == [record for record in free if record["prompt"] not in held_out]


def test_prefix_goes_before_ids() -> None:
    assert generate(source("arithmetic", size=1), prefix="heldout-")[0]["id"] == "heldout-arithmetic-0"


def test_options_from_yaml_are_accepted() -> None:
    yaml = OmegaConf.structured(
        DataSource(name="a", generator="arithmetic", size=5, options={"operators": ["+", "*"], "max_values": [30, 9]})
    )
    assert len(generate(yaml)) == 5


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (source("reasoning_gym:chain_sun"), "unknown reasoning-gym dataset 'chain_sun'.*chain_sum"),
        (source("reasoning_gym:chain_sum", min_word=3), "unknown option min_word; expected one of .*min_terms"),
        (source("reasoning_gym:chain_sum", min_terms=0), "chain_sum refuses.*min_terms"),
        (source("reasoning"), "unknown generator 'reasoning'"),
        (source("arithmetic", term=3), "unknown option term"),
        (source("arithmetic", operators="/"), r"operators is '/'"),
        (source("arithmetic", min_value=5, max_values=[9, 4]), r"min_value=5, max_values=\[9, 4\]"),
        (source("arithmetic", size=500, max_values=[3, 3]), "only 32 different.*expected size=500"),
        (source("arithmetic", max_values=[9]), r"max_values=\[9\]"),
        (source("arithmetic", size=None), "size is None"),
        (source("arithmetic", size=0), "size is 0"),
    ],
)
def test_wrong_source_names_itself_and_the_fix(bad: DataSource, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        generate(bad)
    assert f"data source '{bad.name}'" in str(caught.value)


def test_warmup_needs_one_answer_in_text(root: Path) -> None:
    record = generate(source("reasoning_gym:propositional_logic", size=1))[0]
    with pytest.raises(DataError, match=r"propositional_logic-0.*None"):
        warmup_target(record)
    with pytest.raises(DataError, match="the task is 'code'") as told:
        warmup_target({**record, "task": "code"})
    size, steps = f"{SMALL // 10**6} million", settings.load(["cluster=laptop"]).trainer.warmup.steps
    assert f"cluster=laptop sets trainer.warmup.steps={steps} for models of fewer than {size}" in str(told.value)
    assert "Fix: trainer.warmup.steps=0" in str(told.value)
    assert f"fewer than {size} parameters" in (root / "docs" / "tutorial" / "model.md").read_text()
    assert warmup_target({**record, "task": "code", "meta": {"target": "print(1)"}}) == "print(1)"


def test_import_is_light() -> None:
    code = (
        "import sys, nemo_prorl.data.laptop.generators, nemo_prorl.data.blend, nemo_prorl.data.render, "
        "nemo_prorl.data.laptop.model; "
        "assert not {'torch', 'reasoning_gym', 'transformers', 'sympy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
