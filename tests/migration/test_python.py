"""Python scripts of TRL: what they set is evaluated as Python would, or has no value; nothing is lost."""

from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import cli
from nemo_prorl.errors import ConfigError
from nemo_prorl.migration.files import read
from nemo_prorl.migration.shell import Expression

ARGS = "args = GRPOConfig(beta=0.04, num_generations=8)\n"


def of(text: str, folder: Path) -> dict[str, Any]:
    (folder / "train.py").write_text(text)
    return read(folder / "train.py")


@pytest.mark.parametrize(
    ("text", "beta"),
    [
        (f"{ARGS}args.beta = 0.1", 0.1),
        (f"{ARGS}args.beta = args.learning_rate = 0.1", 0.1),
        (f"{ARGS}args.beta: float = 0.1", 0.1),
        (f"{ARGS}args.beta *= 10", 0.4),
        (f"{ARGS}setattr(args, 'beta', 0.1)", 0.1),
        (f"{ARGS}args = dataclasses.replace(args, beta=0.1)", 0.1),
        (f"{ARGS}def tune(some):\n    some.beta = 0.1\ntune(args)", 0.1),
        (f"def main():\n    {ARGS}    args.beta = 0.1\nif __name__ == '__main__':\n    main()", 0.1),
        (f"{ARGS}if big:\n    args.beta = 0.1", Expression("0.1 in a branch")),
        (f"{ARGS}if big:\n    args.beta = 0.04", 0.04),
        (f"{ARGS}args.beta = pick()", Expression("pick()")),
        ("a = GRPOConfig(beta=0.1)\nb = GRPOConfig(beta=0.2)", Expression("0.1 or 0.2")),
        ("few = dict(beta=0.1)\nGRPOConfig(**few)", 0.1),
        ("few = {'beta': 0.2, 'seed': n()}\nfew['beta'] = 0.1\nGRPOConfig(**few)", 0.1),
        ("few = {}\nfew.update(beta=0.1)\nGRPOConfig(**few)", 0.1),
        ("few = {}\nfew |= {'beta': 0.1}\nGRPOConfig(**{**few, 'seed': 1})", 0.1),
        ("few = {'beta': 0.2} | {'beta': 0.1}\nGRPOConfig(**few)\nfew['beta'] = 0.3", 0.1),
        ("@dataclass\nclass Mine(GRPOConfig):\n    beta: float = 0.1\nMine(seed=1)", 0.1),
        ("p.add_argument('--kl-beta', type=float, default=0.1)\no = p.parse_args()\nGRPOConfig(beta=o.kl_beta)", 0.1),
        ("@dataclass\nclass Options:\n    kl: float = field(default=0.1)\nGRPOConfig(beta=options.kl)", 0.1),
        ("GRPOConfig(beta=float(os.environ.get('BETA', '0.1')))", 0.1),
        ("GRPOConfig(beta=10**-1)", 0.1),
        ("FAST = True\nGRPOConfig(beta=0.1 if FAST else 0.2)", 0.1),
        ("class A:\n    kl: float = 1\nclass B:\n    kl: float = 2\nGRPOConfig(beta=a.kl)", Expression("a.kl")),
    ],
)
def test_what_a_script_sets_has_its_value(text: str, beta: Any, tmp_path: Path) -> None:
    found = of(text, tmp_path)["beta"]
    assert found == beta
    assert isinstance(found, Expression) == isinstance(beta, Expression)


def test_items_that_are_unknown_must_be_set(tmp_path: Path) -> None:
    for text in ("few = {}\nif big:\n    few['beta'] = 1\n", "few = load()\n", "few = {}\nfew[name()] = 1\n"):
        assert of(f"{text}GRPOConfig(**few)", tmp_path) == {"**": Expression("few")}, text


def test_defaults_of_options_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "p.add_argument('--kl', default=0.1)\nGRPOConfig(beta=p.kl, max_steps=9)\nGRPOTrainer('org/model')"
    (tmp_path / "train.py").write_text(text)
    assert cli.main(["convert", "trl", str(tmp_path / "train.py")]) == 0
    printed = capsys.readouterr().out
    assert "trainer.grpo.kl_coef=0.1" in printed
    assert "# options of the script have their defaults: p.kl is 0.1\n" in printed


def test_a_trainer_takes_its_arguments_by_place(tmp_path: Path) -> None:
    found = of("GRPOTrainer('org/model', [accuracy], args, data)", tmp_path)
    assert found["model"] == "org/model"
    assert found["reward_funcs"] == Expression("[accuracy]")
    assert "args" not in found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trainer = RLOOTrainer('m', args=RLOOConfig(beta=0.1))", "RLOOConfig configures another method than GRPO"),
        ("parser = TrlParser((Script, GRPOConfig))\nGRPOTrainer('m')", "its GRPOConfig comes from its command line"),
    ],
)
def test_a_script_without_its_settings_is_refused(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        of(text, tmp_path)
