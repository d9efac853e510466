"""Every option of every command, with each choice and each special value that its help names, is run by a test.

The list of uses comes from the parser: a new option, choice or special value fails `test_every_use_is_run` until
something runs it.  A use is run by a command of the docs (tests/test_docs_commands.py runs those), by one of `RUNS`
below, or by the test that `ELSEWHERE` names, in whose source it is looked for.
"""

import argparse
import ast
import io
import json
import re
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.data.laptop.model import build_tokenizer
from tests.conftest import ROOT
from tests.data import published
from tests.data.preparing import SUMS
from tests.data.test_prepare_judge import MODEL, Judge, pairs
from tests.lines import write_lines
from tests.planning.test_plan import measured_line, write_run
from tests.report.made import make_run
from tests.rewards.test_reverify import stored
from tests.test_docs_commands import COMMANDS, HERE, WHOLE, on_gpus, way_of
from tests.test_whole_commands import DOCTOR, EVALUATE, SERVE, WARMUP

pytestmark = pytest.mark.starts

# --- what there is ---------------------------------------------------------------------------------------------------

# Kinds of a value that a help names in prose, by the words that name them there.
KINDS: dict[str, tuple[str, ...]] = {
    "status RUN": ("run directory", "the folder that prorl launch made"),
    "import-hf HF_DIR": ("Hugging Face model folder", "a model's name on the hub"),
    "export-hf CHECKPOINT": ("checkpoint", "run directory"),
    "launch --stages": ("first and last stage", "a list"),
    "replay METRICS": ("run directory", "metrics.jsonl file"),
    "check-function FUNCTION": ("a name", "FILE.py:FUNCTION", "MODULE:FUNCTION"),
    "convert FILE": ("YAML", "JSON", "shell script", "Python"),
    "reverify RUN_OR_FILE": ("a run directory", "a file of its rollouts/"),
    "evaluate MODEL": ("Hugging Face folder", "hub name", "checkpoint", "run directory", "URL of a server"),
    "evaluate --benchmarks": ("names of benchmarks", "sets", ".yaml", ".jsonl"),
    "watch --benchmarks": ("names, sets or files, as for prorl evaluate",),
    "report RUN": ("run directory", "folder of a chain"),
    "forecast RUN": ("run directory", "folder of a chain"),
    "data prepare --from": ("file", "folder", "'hub'"),
    "data prepare SOURCE": ("a name from `prorl data sources`", "paper"),
}
# Here "or" joins no kinds of a value.
NO_KINDS = {
    *("data prepare --name", "data prepare --revision", "data prepare --prompt", "data prepare --agreement"),
    *("evaluate --checkpoint", "evaluate --as", "export-hf --checkpoint", "doctor --rollout-python"),
    *("fork --checkpoint", "fork --arms", "fork --early", "probe --checkpoint"),
    "check-function kind",
}


def commands(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield name, parser
    for action in inner:
        for word, command in action.choices.items():
            yield from commands(command, f"{name} {word}".strip())


PARSERS = dict(commands(cli._parser()))


def name_of(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def special_values(action: argparse.Action) -> list[str]:
    """The choices, the values beside others in the metavar (N|all), and those that the help explains (0: greedy)."""
    if action.choices:
        return [str(choice) for choice in action.choices]
    help_ = action.help or ""
    found = str(action.metavar or "").split("|")[1:]
    found += [value for value in re.findall(r"(?:^|[;,] )(-?\d+|[a-z]+): ", help_) if not action.required]
    found += re.findall(r"default: (-)(?=,|$)", help_)
    found += [name for names in re.findall(r": (\w+), (\w+) or a ", help_) for name in names]
    return [value for value in found if value not in ("default", "configuration")]


def uses_of(command: str, action: argparse.Action) -> list[str]:
    """The uses of an argument: `COMMAND NAME`, `COMMAND NAME=VALUE`, or `COMMAND NAME=KIND`."""
    name = f"{command} {name_of(action)}"
    special = [f"{name}={value}" for value in special_values(action)]
    if name in KINDS:
        return [*special, *(f"{name}={kind}" for kind in KINDS[name])]
    return special if action.choices else [name, *special]


USES = [use for name, parser in PARSERS.items() for action in arguments(parser) for use in uses_of(name, action)]


def uses_in(words: list[str]) -> Iterator[str]:
    """The uses in the words of a command, those of a kind excepted."""
    command = next((name for name in PARSERS if words[: len(name.split())] == name.split()), None)
    if command is None:
        return
    rest, parser = words[len(command.split()) :], PARSERS[command]
    for action in arguments(parser):
        name = f"{command} {name_of(action)}"
        if not action.option_strings:
            yield name
            yield from (f"{name}={word}" for word in rest if word in special_values(action))
        for at, word in enumerate(rest):
            option, equals, value = word.partition("=")
            if option in action.option_strings:
                value = value if equals else rest[at + 1] if at + 1 < len(rest) and action.nargs != 0 else ""
                yield f"{name}={value}" if value in special_values(action) else name


def test_what_a_help_explains_is_found() -> None:
    assert {"control --wait=0", "report --samples=-1", "data prepare --holdout=all", "replay --mode=advise"} <= set(
        USES
    )
    assert {"rewards score --in=-", "evaluate --checkpoint=best", "evaluate --temperature=0"} <= set(USES)
    told = {
        f"{name} {name_of(action)}": action.help or ""
        for name, parser in PARSERS.items()
        for action in arguments(parser)
    }
    assert {name for name, text in told.items() if " or " in text} <= set(KINDS) | NO_KINDS
    assert [(name, kind) for name, kinds in KINDS.items() for kind in kinds if kind not in told[name]] == []


# --- commands that are run here --------------------------------------------------------------------------------------

MORE = "--field problem=problem --drop-worded --unsafe-no-sandbox"
JUDGE = "--judge-url {judge} --judge-model {model} --judge-workers 2 --judge-deadline-s 60"
# Words of a command, what it says, and the kinds of values that it shows.
RUNS: list[tuple[str, str, tuple[str, ...]]] = [
    ("train --config full.yaml --dry-run trainer.grpo.max_steps=7", "max_steps: 7", ()),
    ("plan --config full.yaml --mean-tokens 50 --tokens-per-s 100", "50", ()),
    ("plan --measured runs/measured --json", '"stages"', ()),
    ("status runs/a --json", '"state"', ("status RUN=run directory",)),
    ("rewards list --json", '"name": "math"', ()),
    ("rewards describe math", "rewards.plugins.math.time_budget_s", ()),
    ("rewards new boxes --dir made/boxes --sandbox", "made/boxes", ()),
    ("""rewards score --in - --out - --settings '{{"math": {{"time_budget_s": 3}}}}'""", '"score": 1.0', ()),
    ("rewards score --in units.jsonl rewards.functions.units=units.py:score --unsafe-no-sandbox", '"score": 1.0', ()),
    ("data prepare math --from sums.jsonl --out d1 --format parquet --prompt text --holdout all", "d1/valid", ()),
    (f"data prepare math --from sums.jsonl --out d2 --check all --limit 6 --seed 3 --workers 2 {MORE}", "6 judged", ()),
    (
        "data prepare math --from folder --out d3 --format jsonl --prompt messages --against seen.jsonl --ngram 3"
        " --overlap 1 --task own --tokenizer words --max-prompt-tokens 200 --check 0",
        "7 kept",
        ("data prepare --from=folder",),
    ),
    (f"data prepare scp-116k --from pairs.jsonl --out d7 --check 0 --agreement judge {JUDGE}", "kept", ()),
    ("data prepare scp-116k --from pairs.jsonl --out d8 --check 0 --agreement none", "5 kept", ()),
    ("data prepare paper --only aime24 --from published --out d9 --scale 0.5 --check 0", "aime24", ()),
    ("launch --stages run1,run3 --here --dry-run run_dir=some data=domains", "stage=run3", ("launch --stages=a list",)),
    (
        "launch --stages run1..run2 --here --dry-run run_dir=two data=domains",
        "stage=run2",
        ("launch --stages=first and last stage",),
    ),
    ("replay runs/a --mode advise --json", "", ("replay METRICS=run directory",)),
    (
        "replay runs/a/metrics.jsonl --mode auto --rules kl_factor=2 cooldown_steps=3",
        "no findings",
        ("replay METRICS=metrics.jsonl file",),
    ),
    ("check-function loss gspo --config full.yaml", "9 of 9", ("check-function FUNCTION=a name",)),
    ("check-function advantage own.py:own", "7 of 7", ("check-function FUNCTION=FILE.py:FUNCTION",)),
    ("check-function reset-rule plateau", "3 of 3", ()),
    (
        "check-function loss nemo_prorl.algorithms.objectives:clip",
        "9 of 9",
        ("check-function FUNCTION=MODULE:FUNCTION",),
    ),
    ("convert trl trl.yaml", "samples_per_prompt=4", ("convert FILE=YAML",)),
    ("convert nemo_rl rl.json", "samples_per_prompt=4", ("convert FILE=JSON",)),
    ("convert openrlhf run.sh", "samples_per_prompt=4", ("convert FILE=shell script",)),
    ("convert verl verl.sh", "samples_per_prompt=4", ()),
    ("convert trl trl.py", "samples_per_prompt=4", ("convert FILE=Python",)),
    (
        "reverify runs/judged --out changed.jsonl --only-changed --workers 2 --unsafe-no-sandbox --settings '{{}}'",
        "math",
        ("reverify RUN_OR_FILE=a run directory",),
    ),
    ("reverify runs/judged/rollouts/step-1.jsonl", "math", ("reverify RUN_OR_FILE=a file of its rollouts/",)),
    ("evaluate --list", "aime24", ()),
    ("report runs/a --samples -1", "report.html", ("report RUN=run directory",)),
    ("report runs/b --samples 0", "report.html", ()),
    ("report runs/chain --samples 3", "report.html", ("report RUN=folder of a chain",)),
    ("forecast runs/a --json", '"name": "a"', ("forecast RUN=run directory",)),
    ("forecast runs/chain", "chain", ("forecast RUN=folder of a chain",)),
]
GLOBAL_BATCH = {"train_global_batch_size": 128}
CONVERTED = {
    "own.py": "def own(centred_GN, reward_GN, valid_GN):\n    return centred_GN\n",
    "trl.yaml": "model_name_or_path: m\nmax_steps: 9\nnum_generations: 4\nper_device_train_batch_size: 8\n",
    "rl.json": json.dumps(
        {
            "defaults": "grpo_math_1B.yaml",
            "grpo": {"num_generations_per_prompt": 4, "max_num_steps": 90},
            "policy": GLOBAL_BATCH,
        }
    ),
    "run.sh": "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --n_samples_per_prompt 4\n",
    "verl.sh": "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=4"
    " algorithm.adv_estimator=grpo"
    " trainer.total_training_steps=9\n",
    "trl.py": "from trl import *\nGRPOTrainer(model='m', args=GRPOConfig(num_generations=4, max_steps=9))\n",
}
SUM = {
    "id": "sum",
    "task": "math",
    "prompt": "2 + 2?",
    "truth": {"answer": "4"},
    "response": "\\boxed{4}",
    "finished": True,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that `RUNS` name."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("a", "b", "chain/run1", "chain/run2"):
        make_run(folder / "runs" / name)
    write_run(folder / "runs" / "measured", [], [measured_line(1, 15_000, 5.0, 48, 10.0)])
    (folder / "runs" / "judged" / "rollouts").mkdir(parents=True)
    write_lines(
        folder / "runs" / "judged" / "rollouts" / "step-1.jsonl", [stored("a", "\\boxed{7}", score=0.0, correct=False)]
    )
    (folder / "full.yaml").write_text(settings.resolved_yaml(settings.load([])))
    (folder / "folder").mkdir()
    for file in ("sums.jsonl", "folder/sums.jsonl"):
        write_lines(folder / file, SUMS)
    write_lines(folder / "seen.jsonl", SUMS[:1])
    published.aime24(folder / "published" / "aime24")
    write_lines(folder / "pairs.jsonl", pairs(6))
    write_lines(folder / "sum.jsonl", [SUM])
    write_lines(folder / "units.jsonl", [{**SUM, "task": "units"}])
    (folder / "units.py").write_text("def score(prompt, response, truth):\n    return 1.0\n")
    build_tokenizer([row["problem"] for row in SUMS]).save_pretrained(folder / "words")
    for name, text in CONVERTED.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    server = Judge()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("line", "told"), [run[:2] for run in RUNS], ids=[run[0] for run in RUNS])
def test_it_runs(
    line: str,
    told: str,
    made: Path,
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(made)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(SUM) + "\n"))
    code = 2 if line.startswith("convert openrlhf") else 0  # OpenRLHF has no number of steps, which must be set
    assert cli.main(shlex.split(line.format(judge=judge.url, model=MODEL))) == code
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("doctor --srun 'srun --overlap'", "--srun srun --overlap: expected together with --nodes"),
        ("reverify runs/judged --only-changed", "--only-changed: expected together with --out FILE"),
        ("reverify runs/judged --workers 0", "--workers 0: expected at least 1"),
        ("rewards score --in sum.jsonl --workers 0", "--workers 0: expected at least 1"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    line: str, told: str, made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(made)
    assert cli.main(shlex.split(line)) == 2
    assert told in caplog.text


# --- all of them -----------------------------------------------------------------------------------------------------

# Uses that are run by a test elsewhere: FILE::FUNCTION, and its source has the option and the value.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "tests/rewards/test_conformance.py::test_results_leave_as_lines_or_as_json": (
        *("rewards test NAME", "rewards test --json"),
    ),
    "tests/rewards/test_conformance.py::test_examples_and_settings_are_given": (
        *("rewards test --examples", "rewards test --settings"),
    ),
    "tests/test_whole_commands.py::test_the_reward_server_with_all_its_options": ("rewards serve --parent-pid",),
    "tests/data/test_prepare_csv.py::test_a_column_of_right_responses_is_what_a_warm_up_teaches": (
        "data prepare --target",
    ),
    "tests/data/test_prepare_csv.py::test_kept_columns_are_where_a_reward_function_finds_them": (
        "data prepare --keep",
    ),
    "tests/test_whole_commands.py::test_names_on_the_hub": ("data prepare --revision",),
    "tests/data/test_prepare_judge.py::test_the_grader_compares_boxed_answers_without_a_judge": (
        "data prepare --agreement=grader",
    ),
    "tests/launcher/test_chain.py::test_each_stage_is_a_job_that_waits_for_the_one_before": (
        "launch --container-mounts",
    ),
    "tests/lifecycle/test_control.py::test_the_command_asks_waits_and_says_the_answer": ("control what=reset",),
    "tests/test_main_job.py::test_a_run_can_be_asked_why": (
        *("bisect RUN", "bisect OTHER", "bisect --json", "replay-training --with"),
    ),
    "tests/test_main_job.py::test_an_audit_names_the_side_that_is_off": (
        "audit RUN",
        "audit --step",
        "audit --responses",
    ),
    "tests/test_main_job.py::replay": ("replay-training RUN", "replay-training --from", "replay-training --to"),
    "tests/lifecycle/test_control.py::test_stored_batches_are_kept_on_request": ("control what=keep-batches",),
    "tests/launcher/test_fork.py::test_equal_arms_are_equal_to_the_bit": (
        *("fork RUN", "fork --checkpoint", "fork --checkpoint=newest", "fork --checkpoint=best", "fork --arms"),
        *("fork --steps", "fork --out", "fork --dry-run"),
    ),
    "tests/launcher/test_fork.py::test_an_arm_that_is_decided_is_stopped_and_not_continued": ("fork --early",),
    "tests/report/test_step_groups.py::test_only_some_groups_are_on_the_page_and_the_table_has_all": (
        *("report --step", "report --draw"),
    ),
    "tests/launcher/test_fork.py::test_each_arm_is_a_job_of_its_own_configuration_and_is_submitted_once": (
        "fork --sbatch",
    ),
    "tests/lifecycle/test_control.py::test_without_a_wait_it_returns_the_id": ("control --wait=0",),
    "tests/lifecycle/test_control.py::test_without_an_answer_the_request_stays": ("control --wait",),
    "tests/test_docs_commands.py::test_the_doctor_and_its_preflight": ("doctor --rows",),
    "tests/evaluation/test_run.py::test_a_corrected_scorer_judges_the_stored_responses_again": (
        "evaluate --judge-again",
    ),
    "tests/evaluation/test_paper.py::test_all_of_the_papers_benchmarks_in_one_command": ("evaluate --as",),
    "tests/evaluation/test_evaluate.py::test_with_real_engines_killed_resumed_and_done_again_by_its_manifest": (
        "evaluate --engines",
    ),
    "tests/test_whole_commands.py::test_a_checkpoint_and_a_name_on_the_hub_are_evaluated": ("evaluate --temperature",),
    "tests/evaluation/test_checkpoint.py::test_what_is_exported_and_evaluated": (
        *("evaluate --checkpoint=newest", "evaluate --checkpoint=best", "evaluate --checkpoint"),
        *("export-hf --checkpoint=newest", "export-hf --checkpoint=best", "export-hf --checkpoint"),
    ),
    "tests/evaluation/test_checkpoint.py::test_what_is_probed": (
        *("probe --checkpoint=newest", "probe --checkpoint=best", "probe --checkpoint"),
    ),
    "tests/data/test_prepare_code.py::test_livecodebench_of_another_period_and_release": (
        *("data prepare --since", "data prepare --until"),
    ),
    "tests/evaluation/test_probe.py::test_a_whole_probe": ("probe --config", "probe --out"),
    "tests/evaluation/test_watch.py::test_what_is_asked_for_is_handed_on": ("watch --limit", "watch --data"),
    "tests/evaluation/test_watch.py::test_only_every_so_many_steps": ("watch --every",),
    "tests/report/test_serve.py::test_it_answers_until_a_signal_and_refuses_a_port_that_is_taken": (
        *("report --port", "report --port=0"),
    ),
}

# Kinds of values that a test elsewhere runs, where no word says which kind it is.
OF_THE_PAGES = "tests/test_docs_commands.py::"
KINDS_ELSEWHERE: dict[str, str] = {
    "status RUN=the folder that prorl launch made": f"{OF_THE_PAGES}test_where_a_run_or_a_chain_is",
    "import-hf HF_DIR=Hugging Face model folder": f"{OF_THE_PAGES}test_a_model_is_imported",
    "import-hf HF_DIR=a model's name on the hub": "tests/test_whole_commands.py::test_names_on_the_hub",
    "export-hf CHECKPOINT=checkpoint": "tests/policy/test_import_export.py::test_export_prints_one_line",
    "export-hf CHECKPOINT=run directory": f"{OF_THE_PAGES}test_a_run_is_exported",
    "data prepare --from=file": f"{OF_THE_PAGES}test_data_is_prepared",
    "data prepare SOURCE=a name from `prorl data sources`": f"{OF_THE_PAGES}test_data_is_prepared",
    "data prepare SOURCE=paper": "tests/data/test_prepare_paper.py::test_one_folder_of_the_paper",
    "data prepare --from='hub'": "tests/data/test_prepare_hub.py::test_a_data_set_of_the_hub_at_its_pinned_commit",
    "evaluate MODEL=Hugging Face folder": f"{OF_THE_PAGES}test_the_pages_about_evaluation",
    "evaluate MODEL=run directory": f"{OF_THE_PAGES}test_the_pages_about_evaluation",
    "evaluate MODEL=hub name": "tests/test_whole_commands.py::test_a_checkpoint_and_a_name_on_the_hub_are_evaluated",
    "evaluate MODEL=checkpoint": "tests/test_whole_commands.py::test_a_checkpoint_and_a_name_on_the_hub_are_evaluated",
    **{
        f"evaluate {kind}": "tests/test_whole_commands.py::test_an_address_is_evaluated_with_all_the_options"
        for kind in (
            "MODEL=URL of a server",
            *(f"--benchmarks={kind}" for kind in KINDS["evaluate --benchmarks"]),
        )
    },
    "watch --benchmarks=names, sets or files, as for prorl evaluate": (
        f"{OF_THE_PAGES}test_the_checkpoints_of_a_run_are_evaluated_beside_it"
    ),
}


def of_the_docs() -> set[str]:
    ran = [words for page, words in COMMANDS if way_of(page, words) in HERE | WHOLE and not on_gpus(words)]
    return {use for words in ran if Path(words[0]).name == "prorl" for use in uses_in(words[1:])}


def test_every_use_is_run() -> None:
    """A use that is missing needs a line in `RUNS`, a command on a page, or a test of its own and its name here."""
    ran = {use for line, _, kinds in RUNS for use in (*uses_in(shlex.split(line.replace("{{", ""))), *kinds)}
    ran |= {use for words in (SERVE, WARMUP, DOCTOR, EVALUATE) for use in uses_in(words)} | of_the_docs()
    ran |= {use for uses in ELSEWHERE.values() for use in uses} | set(KINDS_ELSEWHERE)
    assert [use for use in USES if use not in ran] == []
    assert [use for uses in (*ELSEWHERE.values(), KINDS_ELSEWHERE) for use in uses if use not in USES] == []


def source_of(test: str) -> str:
    """The source of FILE::FUNCTION."""
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text()
    [found] = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == name]
    return ast.get_source_segment(text, found) or ""


@pytest.mark.parametrize("test", [*ELSEWHERE, *dict.fromkeys(KINDS_ELSEWHERE.values())])
def test_the_tests_elsewhere_run_what_they_are_named_for(test: str) -> None:
    source = source_of(test)
    for use in ELSEWHERE.get(test, ()):
        name, _, value = use.partition("=")
        word = name.split()[-1]
        assert not word.startswith("--") or re.search(rf"{word}\b", source), use
        assert re.search(rf"\b{re.escape(value)}\b", source) or value == "", use
