"""Published examples of other trainers: converts them, compares number by number with their source, and makes the page.

`examples.yaml` has the settings of each example, and the defaults of its trainer.  From them the file of the example is
written in its trainer's form.  To write docs/howto/migration_examples.md: python -m tests.migration.published
"""

import contextlib
import io
import shlex
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from nemo_prorl import cli, settings
from tests import paper_model
from tests.conftest import ROOT
from tests.migration.numbers import UNUSED, Number, Settings
from tests.migration.schedules import NUMBERS

DATA: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "examples.yaml").read_text())
EXAMPLES: list[dict[str, Any]] = DATA["examples"]
PAGE = ROOT / "docs" / "howto" / "migration_examples.md"
TITLES = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF", "nemo_rl": "NeMo-RL"}
BASE = "grpo_math_1B.yaml"  # that of NeMo-RL's other files


MODEL: dict[str, Settings] = {  # examples have the settings of the algorithm only
    "trl": {"model_name_or_path": "org/model", "max_steps": 100},
    "verl": {"actor_rollout_ref.model.path": "org/model", "trainer.total_training_steps": 100},
    "openrlhf": {"actor.model_name_or_path": "org/model"},  # it has no key for steps
    "nemo_rl": {"grpo.max_num_steps": 100},
}

_METHODS = "trainer.grpo.loss", "trainer.grpo.advantage"  # without a value, the loader gets its own


class Compared(NamedTuple):
    """A number there and here; `is_named` says that the output of `prorl convert` names it."""

    number: Number
    there: Any
    here: Any
    is_named: bool

    @property
    def is_same(self) -> bool:
        return _plain(self.there) == _plain(self.here)


def _plain(value: Any) -> Any:
    """Return a number for an int, a float and a text such as 1e-8, so that 1, 1.0 and `1` are the same."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    with contextlib.suppress(ValueError):
        return value if value is None or isinstance(value, bool) else float(value)
    return value


def write(example: dict[str, Any], folder: Path, form: str | None = None) -> Path:
    """Write the file of an example in the form of its trainer; return its path.

    Args:
        form: for TRL, `py` (the default) or `yaml`.
    """
    trainer, found = example["trainer"], MODEL[example["trainer"]] | example["settings"]
    if trainer == "trl":
        return _write_trl(found, folder, form or "py")
    if trainer == "nemo_rl":
        base = folder / BASE
        more = {"policy.model_name": "Qwen/Qwen2.5-1.5B", "policy.precision": "bfloat16", "cluster.num_nodes": 1}
        base.write_text(yaml.safe_dump(_tree(more | DATA["defaults"]["nemo_rl"]["settings"])))
        (folder / "grpo.yaml").write_text(yaml.safe_dump({"defaults": BASE, **_tree(found)}))
        return folder / "grpo.yaml"
    words = {key: shlex.quote(_text(value)) for key, value in found.items()} | example.get("written", {})
    lines = ["set -x", *(f"{name}={value}" for name, value in example.get("variables", {}).items())]
    if trainer == "verl":
        module = "recipe.dapo.main_dapo" if "recipe" in example["repository"] else "verl.trainer.main_ppo"
        command = [f"python3 -m {module}", *(f"{key}={word}" for key, word in words.items())]
    else:
        flags = {key: "" if found[key] is True else word.strip("'[]").replace(",", "") for key, word in words.items()}
        command = ["python3 -m openrlhf.cli.train_ppo_ray", *(f"--{key} {word}".strip() for key, word in flags.items())]
    path = folder / "run.sh"
    path.write_text("\n".join([*lines, " \\\n    ".join(command)]) + "\n")
    return path


def _write_trl(found: Settings, folder: Path, form: str) -> Path:
    path = folder / f"train.{form}"
    if form == "yaml":
        path.write_text(yaml.safe_dump(found))
    else:
        arguments = ", ".join(f"{key}={value!r}" for key, value in found.items())
        path.write_text(f"from trl import GRPOConfig\n\ntraining_args = GRPOConfig({arguments})\n")
    return path


def _text(value: Any) -> str:
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else str(value)


def _tree(flat: Settings) -> dict[str, Any]:
    cfg = OmegaConf.create()
    for key, value in flat.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    tree: dict[str, Any] = OmegaConf.to_container(cfg)  # type: ignore[assignment]
    return tree


def run(trainer: str, path: Path) -> tuple[int, str]:
    """Return the exit code and the output of `prorl convert`."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.main(["convert", trainer, str(path)])
    return code, out.getvalue()


def overrides(output: str) -> list[str]:
    """Return the overrides of the printed command."""
    words = shlex.split(output.replace("\\\n", " "), comments=True)
    assert words[:3] == ["prorl", "train", "cluster=h100_4x8"], output
    return words[2:]


def telling(output: str) -> list[str]:
    """Return the comments that tell of a difference or of a missing value: all but the list of single settings."""
    comments = output.split("settings without a counterpart")[0].splitlines()
    return [line for line in comments if line.startswith("#") and "no override needed" not in line]


def compare(example: dict[str, Any], folder: Path, form: str | None = None) -> tuple[int, str, list[Compared]]:
    """Convert an example; return the exit code, the output, and each number there and here.

    The overrides are loaded as a run loads them, with the shape of the paper's model.  Where a value is missing, the
    number here is None, and the loader gets a value that fits.
    """
    trainer = example["trainer"]
    code, output = run(trainer, write(example, folder, form))
    words = overrides(output)
    model = f"pretrained_checkpoint.restore_from_path={paper_model.write(folder / 'model')}"
    missing = [line.split(":")[0].strip("# ") for line in output.splitlines() if line.startswith("#   trainer.")]
    fitting = [f"{key}={16 if 'prompts' in key else 1}" for key in missing if key not in _METHODS]
    cfg = settings.load([*words, model, *fitting, "rollout.device_memory_gb=1000"])  # memory is not the question
    s = {**DATA["defaults"][trainer]["settings"], **example["settings"]}
    found = [
        _compared(number, trainer, s, cfg, missing, telling(output)) for number in NUMBERS if trainer in number.there
    ]
    return code, output, [one for one in found if one.there != UNUSED]


def _compared(number: Number, trainer: str, s: Settings, cfg: Any, missing: list[str], lines: list[str]) -> Compared:
    found, key = number.there[trainer], number.here
    word, value = (found.rsplit(".", 1)[-1], s[found]) if isinstance(found, str) else (found[0], found[1](s))
    here = key[1:] if key.startswith("=") else None if key in missing else OmegaConf.select(cfg, key)
    here = OmegaConf.to_container(here) if OmegaConf.is_config(here) else here
    return Compared(number, value, here, any(word in line for line in lines))


def page() -> str:
    """Return the page: for each trainer a table of its examples, with the numbers there and, if not the same, here."""
    parts = [_HEAD]
    for trainer, title in TITLES.items():
        examples = [example for example in EXAMPLES if example["trainer"] == trainer]
        columns = [f"{trainer[0].upper()}{index + 1}" for index in range(len(examples))]
        with tempfile.TemporaryDirectory() as folder:
            found = [compare(example, Path(folder))[2] for example in examples]
        results = [{one.number.name: one for one in example} for example in found]
        parts += [f"## {title}", _sources(trainer, columns, examples), _tables(columns, results)]
    return "\n\n".join(parts) + "\n"


def _sources(trainer: str, columns: list[str], examples: list[dict[str, Any]]) -> str:
    source = DATA["defaults"][trainer]
    lines = [f"Defaults: {source['path']}, {_at(source['repository'])}.", ""]
    for column, example in zip(columns, examples, strict=True):
        name = f", {example['name']}" if "name" in example else ""
        elsewhere = f", {_at(example['repository'])}" if example["repository"] != source["repository"] else ""
        lines.append(f"- {column}: {example['path']}{name}{elsewhere}")
    return "\n".join(lines)


def _at(repository: str) -> str:
    commit = DATA["commits"][repository]
    return f"[{repository} {commit[:8]}](https://github.com/{repository}/tree/{commit})"


def _tables(columns: list[str], results: list[dict[str, Compared]]) -> str:
    """Return a sentence with the numbers that all examples share, and a table of the others."""
    everywhere, rows = [], [["", *columns], ["---"] * (len(columns) + 1)]
    for number in NUMBERS:
        cells = [_cell(result.get(number.name)) for result in results]
        if len(set(cells)) == 1 and cells[0]:
            everywhere.append(f"{number.name} {cells[0]}")
        elif any(cells):
            rows.append([number.name, *cells])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"In all of them: {'; '.join(everywhere)}.\n\n<!-- table -->\n{table}\n<!-- /table -->"


def _cell(one: Compared | None) -> str:
    if one is None:
        return ""
    there, here = (_short(value) for value in (one.there, one.here))
    if one.is_same:
        return there
    return f"**{there}; set it yourself**" if one.here is None else f"**{there}; here {here}**"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    value = _plain(value)
    if isinstance(value, float):
        return f"{value:g}"
    return {None: "none", True: "on", False: "off"}.get(value, str(value).replace("_", " "))


_HEAD = """# Published examples of other trainers, converted

[`prorl convert`](migration.md) was compared with the examples below, number by number: each example was converted, the
overrides were loaded, and each number that decides the algorithm was compared with that of the example or, where the
example leaves it out, with the default of its trainer. A number stands once if it is the same here. Bold: it differs,
and the output of the command says so. The tests repeat this comparison.

The tables have the steps of a warm-up of the learning rate, or their share of all steps. Within a warm-up the rates
differ by a step, and the output says so ([why](learning_rate.md#from-another-trainer)).

Not in the tables, because no key sets them: small constants such as the one beside a standard deviation (1e-4 in TRL,
1e-6 in verl and here, 1e-9 in OpenRLHF) and limits of a single KL term (10 in verl, OpenRLHF and NeMo-RL)."""


if __name__ == "__main__":
    PAGE.write_text(page())
