"""Names of other trainers' keys: what an unknown key suggests, and which files are refused."""

import json
import re
from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.config import all_keys
from nemo_prorl.errors import ConfigError
from nemo_prorl.migration import our
from nemo_prorl.migration.files import read
from nemo_prorl.migration.names import TITLES, known, meant, names, table
from nemo_prorl.migration.rules import convert
from nemo_prorl.migration.shell import Expression


def test_every_key_of_the_table_is_a_key_here() -> None:
    own = {key.name for key in all_keys()}
    for keys in names().values():
        for ours in keys.values():
            assert ours in own or ours.lstrip("+").startswith("model."), ours


@pytest.mark.parametrize("trainer", TITLES)
def test_what_is_told_depends_on_keys_that_are_known(trainer: str) -> None:
    ours, (theirs, _), tables = {key.name for key in all_keys()}, known(trainer), table(trainer)
    for conditions, text in tables["told"] + tables.get("noted", []):
        keys = conditions.keys() - ours | set(re.findall(r"\{(.*?)\}", text))
        assert {part for key in keys for part in key.split(".")} <= theirs, text


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("lr", "model.optim.lr"),
        ("trainer.lr", "model.optim.lr"),
        ("trainer.grpo.lr", "model.optim.lr"),
        ("optim.lr", "model.optim.lr"),
        ("learning_rate", "model.optim.lr"),
        ("lr_scheduler_type", "model.optim.sched.name"),
        ("warmup_ratio", "model.optim.sched.warmup_ratio"),
        ("model.optim.lr_warmup_steps", "model.optim.sched.warmup_steps"),
        ("trainer.grpo.beta", "trainer.grpo.kl_coef"),
        ("trainer.grpo.batch_size", "trainer.grpo.prompts_per_step"),
        ("num_generations", "trainer.grpo.samples_per_prompt"),
        ("actor_rollout_ref.rollout.n", "trainer.grpo.samples_per_prompt"),
        ("max_completion_length", "trainer.grpo.max_response_tokens"),
        ("per_device_train_batch_size", "trainer.grpo.prompts_per_step"),
        ("gradient_accumulation_steps", "trainer.grpo.prompts_per_step"),
        ("scale_rewards", "trainer.grpo.advantage"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "trainer.grpo.updates_per_step"),
        ("trainer.grpo.max_step", "trainer.grpo.max_steps"),
        ("trainer.gropo.max_steps", "trainer.grpo.max_steps"),
    ],
)
def test_an_unknown_key_suggests_the_key_of_its_meaning(key: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"Did you mean {expected}\?"):
        settings.load([f"{key}=1"])


def test_a_name_without_a_meaning_here_has_none() -> None:
    assert meant("trainer.colour") is None


@pytest.mark.parametrize(
    ("file", "text"), [("a.yaml", "a: ["), ("b.py", "x ="), ("c.sh", "echo 'open"), ("d.json", "{}")]
)
def test_what_cannot_be_read_is_refused(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=file):
        read(tmp_path / file)
    (tmp_path / "other.json").write_text(json.dumps({"colour": "red"}))
    assert cli.main(["convert", "verl", str(tmp_path / "other.json")]) == 2


@pytest.mark.parametrize("trainer", TITLES)
def test_an_unknown_value_of_any_key_is_asked_for(trainer: str) -> None:
    tables = table(trainer)
    for theirs, ours in (tables["keys"] | tables["derived"]).items():
        made = convert(trainer, {theirs: Expression("args.x")})
        assert ours not in made.overrides, theirs
        assert f"{theirs}=args.x has no value here" in made.unknown[ours]


@pytest.mark.parametrize("trainer", TITLES)
def test_no_value_of_any_key_leaves_a_number_of_this_project_in_its_place(trainer: str) -> None:
    complete = convert(trainer, {})
    decisive = complete.overrides.keys() | complete.unknown.keys()
    for theirs in table(trainer)["defaults"]:
        made = convert(trainer, {theirs: None})
        assert decisive - made.overrides.keys() - made.unknown.keys() - {"model.optim.eps"} <= MAY_BE_ABSENT, theirs


MAY_BE_ABSENT = {  # they belong to a method that null switches off
    "seed",
    "trainer.grpo.correction.cap",
    "trainer.precision",
    "trainer.devices",
    "trainer.num_nodes",
    "rollout.tensor_parallel_size",
    *(f"trainer.grpo.{key}" for key in ("checkpoint_every", "keep_best", "validate_every")),
    *(f"trainer.grpo.validation_{key}" for key in ("samples", "temperature", "top_p")),
    "model.megatron_amp_O2",
    "model.micro_batch_size",
    "model.optim.sched.min_lr",
    "model.optim.sched.warmup_steps",
    "model.optim.sched.warmup_ratio",
}


@pytest.mark.parametrize(
    ("trainer", "key", "value"),
    [("verl", "data.train_batch_size", "auto"), ("trl", "learning_rate", [1]), ("openrlhf", "actor.adam.betas", 0.9)],
)
def test_a_value_of_another_type_is_asked_for(trainer: str, key: str, value: object) -> None:
    made = convert(trainer, {key: value})
    ours = names()[trainer][key]
    assert made.unknown[ours].startswith(f"{key} is {value!r}; expected a value such as the default, ")
    assert ours not in made.overrides
    assert made.overrides.keys() >= {our.CLIP_LOW, our.KL}


def test_a_setting_has_the_name_that_the_file_gives_it() -> None:
    made = convert("openrlhf", {"normalize_reward": True, "top_p": 1, "n_samples_per_prompt": 1, "init_kl_coef": 0.1})
    assert "normalize_reward=True has no effect there, without reward.model_name_or_path" in made.notes
    assert {"rollout.top_p", "rollout.n_samples_per_prompt"} & made.unused.keys() == {"rollout.top_p"}
    made = convert("openrlhf", {"reward.clip_range": [-1, 1], "kl_target": Expression("args.x")})
    assert any(text.startswith("reward.clip_range=[-1, 1]: ") for text in made.differs)
    assert made.unknown["kl_target"].startswith("kl_target=args.x has no value here")
