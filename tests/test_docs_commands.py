"""Each command of README and docs is run: as it stands where that is quick, else with `--dry-run` or made smaller.

`way_of` says how; a command that it does not know fails here, so that none can be added without a way to run it.
What takes engines or ranks is run, too, in the slow tests at the end.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.data.laptop.model import build_tokenizer
from nemo_prorl.data.prepare.drafts import Draft
from nemo_prorl.data.prepare.rows import Row
from nemo_prorl.data.prepare.sources import SOURCES
from nemo_prorl.data.prepared import PAPER
from nemo_prorl.deadlines import Deadline
from nemo_prorl.launcher.submission import CLUSTER
from nemo_prorl.lifecycle.retention import FORMAT
from nemo_prorl.rewards.scaffold import new_plugin
from tests.conftest import ROOT
from tests.data import published
from tests.data.preparing import SUMS, TEST, touch_prepared
from tests.data.test_prepare_judge import MODEL, Judge, pairs
from tests.evaluation.test_evaluate import Address
from tests.launcher.test_chain import Slurm, finish
from tests.lines import read_lines, write_lines
from tests.paper_model import write_hollow
from tests.policy.models import MODELS, QWEN2, write_model
from tests.report.made import evaluation, make_run
from tests.rewards.test_scaffold import COMMANDS as OF_THE_PLUGIN_PAGE
from tests.test_docs import COMMANDS as IN_SH_BLOCKS
from tests.test_docs import PAGES, blocks, model_folder, stage_words
from tests.whole_runs import SMALL

pytestmark = pytest.mark.starts

Words = list[str]

HERE = {  # in this process, on files made for it
    "prorl plan",
    "prorl train",
    "prorl launch",
    "prorl status",
    "prorl data",
    "prorl report",
    "prorl replay",
    "prorl forecast",
    "prorl convert",
    "prorl import-hf",
    "prorl export-hf",
    "stage.sbatch",
    "rewards score",
    "df",
}
# slow: with engines, ranks or a server
WHOLE = {"prorl doctor", "prorl probe", "prorl evaluate", "prorl watch", "prorl control", "report --serve"}
ELSEWHERE = {  # why not here
    "paper.md": "tests/paper/test_miniature.py walks the page's commands in their order",
    "evaluate paper": "tests/paper/test_miniature.py measures the paper's benchmarks and makes its table",
    "hf": "tests/data/test_prepare_hub.py holds the message that has this command",
    "own_benchmark.md": "tests/evaluation/test_own_benchmark.py walks the page's commands in their order",
    "fork.md": "tests/launcher/test_fork.py::test_equal_arms_are_equal_to_the_bit forks a whole run",
    "ask_a_run.md": "tests/test_main_job.py::test_a_run_can_be_asked_why runs the page's commands on a whole run",
    "own_loss.md": "tests/lifecycle/test_own_functions.py runs the page's commands",
    "plugins.md": "tests/rewards/test_scaffold.py runs the page's commands in their order",
    "make": "tests/test_docs.py asks make what it would run, which is run in small here and in tests/test_main_job.py",
    "ablations.py": "hours of work: tests/test_docs.py looks for its options",
    "resets.py": "hours of work: tests/test_docs.py looks for its options",
    "smollm2.py": "downloads 93 MB: tests/test_examples.py makes a tokenizer by it",
    "dev-cluster.sh": "tests/cluster starts such a cluster",
    "lock.py": "asks a package index: tests/test_setup.py holds the lock that it wrote",
    "container": "no container engine here: tests/test_container.py holds the Dockerfile and what it calls",
}


def way_of(page: str, words: Words) -> str:
    """What a command counts as; raises for one that nothing here runs."""
    program = Path(words[0]).name
    if page in ("plugins.md", "paper.md", "own_benchmark.md", "own_loss.md", "ask_a_run.md", "fork.md"):
        return page
    if page == "container.md" and program in ("docker", "enroot", "srun"):
        return "container"
    if any("dev-cluster.sh" in word for word in words):
        return "dev-cluster.sh"
    if "slurm/stage.sbatch" in words and program in ("sbatch", "bash"):
        return "stage.sbatch"
    if program.startswith("python"):
        return Path(words[1]).name
    if words[1:3] == ["rewards", "score"]:
        return "rewards score"
    if words[1:2] == ["evaluate"] and "paper" in words:
        return "evaluate paper"
    if program == "prorl" and "--serve" in words:
        return "report --serve"
    return f"prorl {words[1]}" if program == "prorl" else program


def of_console_blocks() -> list[tuple[str, Words]]:
    found = []
    for page in PAGES:
        for block in blocks(page, "console"):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    found.append((page.name, words))
    return found


COMMANDS = [*IN_SH_BLOCKS, *of_console_blocks()]


def test_every_command_has_a_way_to_be_run() -> None:
    known = HERE | WHOLE | set(ELSEWHERE)
    assert [(page, " ".join(words)) for page, words in COMMANDS if way_of(page, words) not in known] == []
    used = {way_of(page, words) for page, words in COMMANDS}
    assert known - used == set()
    there = [" ".join(shlex.split(line, comments=True)) for line in OF_THE_PLUGIN_PAGE]
    assert [" ".join(words) for page, words in COMMANDS if page == "plugins.md"] == there


def test_each_job_in_the_image_has_its_mounts() -> None:
    """Without them the run directory and MODEL do not exist in the container."""
    jobs = [" ".join(words) for _, words in COMMANDS if "--container-image=IMAGE" in words and words[0] != "srun"]
    assert len(jobs) > 5
    assert [job for job in jobs if " --container-mounts=/" not in job] == []


def chains(words: Words) -> bool:
    """Composes all eight configurations of a chain, which takes seconds."""
    return way_of("", words) in ("prorl plan", "prorl launch")


def commands_of(*ways: str, slow: Callable[[Words], bool] = lambda _: False) -> Any:
    """Each once; those that `slow` says in `make test-all` only."""
    chosen = [(page, words) for page, words in COMMANDS if way_of(page, words) in ways]
    unique = list({" ".join(words): words for _, words in chosen}.values())
    marks = [[pytest.mark.slow] if slow(words) else [] for words in unique]
    return pytest.mark.parametrize(
        "words", [pytest.param(words, marks=some) for words, some in zip(unique, marks, strict=True)], ids=" ".join
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages speak of, and a Slurm that takes every job."""
    (tmp_path / "runs").mkdir()
    write_lines(
        tmp_path / "my-problems.jsonl",
        [{"problem": f"What is {n} plus 25?", "answer": str(n + 25)} for n in range(1205)],
    )
    write_lines(tmp_path / "requests.jsonl", [{**REQUEST, "response": "\\boxed{4}", "finished": True}])
    write_lines(tmp_path / "responses.jsonl", [{**UNITS, "response": "300", "finished": True}])
    for page, name in (("reward_function", "units.py"), ("reward_server", "judge.py")):
        code = blocks(ROOT / "docs" / "howto" / f"{page}.md", "python")
        (tmp_path / name).write_text(next(text for text in code if text.startswith(f"# {name}")))
    cluster = Slurm(tmp_path / "slurm")
    for name, answer in (("sbatch", "echo $((16 + n))"), ("scancel", ""), ("squeue", "")):
        cluster.add(name, answer)
    monkeypatch.setenv("PATH", f"{tmp_path / 'slurm'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


UNITS = {"id": "1", "task": "units", "prompt": "3 m in cm?", "truth": {"answer": "300"}}
REQUEST = {"id": "sum", "task": "math", "prompt": "2 + 2?", "truth": {"answer": "4"}}


@pytest.fixture
def runs(place: Path) -> Path:
    """With the runs and evaluations that the pages speak of, too."""
    for name in ("laptop", "hot", "first", "second", "prorl/run1", "chain/run1", "chain/run2"):
        make_run(place / "runs" / name)
    for number, name in enumerate(("eval-base", "eval-best")):
        evaluation(place / "runs" / name, 0.1 + 0.2 * number)
    return place


QWEN_0P5B = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}


def prepared(place: Path) -> None:
    """What was prepared by the time that a page says `prorl plan`: files of the right names, and a record or two."""
    touch_prepared(place / "prepared")
    (place / "prepared" / "mine").mkdir()
    for part in ("train", "validation"):
        write_lines(place / "prepared" / "mine" / f"{part}.jsonl", [REQUEST | {"id": part, "prompt": part}])
    write_lines(place / "units.jsonl", [UNITS])
    half_billion = place / "models" / "SmolLM2-135M-Instruct"
    half_billion.mkdir(parents=True)
    (half_billion / "config.json").write_text(json.dumps(QWEN_0P5B))
    write_hollow(half_billion)
    build_tokenizer(["What?", "How?"]).save_pretrained(half_billion)
    (half_billion / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def with_model(words: Words, folder: Path) -> Words:
    if not any("=MODEL" in word for word in words):
        return words
    model = model_folder(folder / "model")
    build_tokenizer(["What?", "How?"]).save_pretrained(model)
    return [word.replace("=MODEL", f"={model}") for word in words]


def done(words: Words) -> None:
    """`prorl` in this process: ends with 0."""
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 0, shlex.join(words)


@commands_of("prorl plan", "prorl train", "prorl launch", slow=chains)
def test_what_would_be_run_is_told(
    words: Words, place: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    prepared(place)
    dry = ["--dry-run"] if words[1] == "train" or "--here" in words else []
    if "--from" in words:
        checkpoint = Path(words[words.index("--from") + 1])
        finish(checkpoint.parents[2], "run3")
        (checkpoint.parent / "step-000020").rename(checkpoint)
    forks = any(word.startswith("chain.start_from=runs/laptop") for word in words)
    if forks:
        finish(place / "runs", "run1")
        (place / "runs" / "run1").rename(place / "runs" / "laptop")
        state = {"format": FORMAT, "step": 20, "validation": {"scores": {}}, "resets": {"done": []}}
        (place / "runs/laptop/checkpoints/step-000020/state.json").write_text(json.dumps(state))
    there = [f"data.folder={place / 'prepared'}"] if words[1] == "launch" else []  # jobs start in the project's folder
    done([*with_model(words, place)[1:], *there, *dry])
    assert len(capsys.readouterr().out) > 100
    assert not forks or "cannot begin yet" not in caplog.text


@commands_of("prorl convert")
def test_another_configuration_is_converted(words: Words, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "actor_rollout_ref.model.path=m data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8"
    sizes += " actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=grpo"
    (place / words[-1]).write_text(f"python3 -m verl.trainer.main_ppo {sizes} trainer.total_training_steps=15\n")
    done(words[1:])
    assert "trainer.grpo.prompts_per_step=8" in capsys.readouterr().out


@commands_of("prorl replay", "prorl report", "prorl forecast")
def test_what_was_recorded_is_read(words: Words, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done(words[1:])
    assert capsys.readouterr().out
    assert words[1] in ("replay", "forecast") or list(runs.rglob("*.html"))


@commands_of("prorl status")
def test_where_a_run_or_a_chain_is(words: Words, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if words[2].endswith("weekend"):  # which the page has just launched
        prepared(runs)
        given = [f"run_dir={words[2]}", f"data.folder={runs / 'prepared'}", f"{BASE}=MODEL"]
        done(with_model(["launch", "--stages", "run1..run2", *given], runs))
    done(words[1:])
    assert "step" in capsys.readouterr().out


BASE = "pretrained_checkpoint.restore_from_path"

# What a page takes from the hub, as rows of the same form; tests/data/test_prepare_hub.py asks a hub.
ROWS = {
    "deepscaler": SUMS,
    "math": SUMS,
    "eurus2-rl": [
        {
            "prompt": [{"role": "user", "content": "Add two numbers."}],
            "reward_model": {"ground_truth": json.dumps(TEST)},
            "ability": "code",
        }
    ],
    "code": [{"problem": "Add two numbers.", "tests": [{"input": "1 2\n", "output": "3\n"}]}],
    "humaneval": [
        {
            "prompt": "def one():\n",
            "entry_point": "one",
            "canonical_solution": "    return 1\n",
            "test": "def check(f):\n    assert f() == 1\n",
        }
    ],
    "mbpp": [{"text": "Say one.", "code": "def one(): return 1", "test_list": ["assert one() == 1"]}],
    "leetcode": [{"problem": "Say one.", "test": "assert one() == 1"}],
    "stem": [{"question": "How many?", "answer": "5", "unit": "kg"}],
    "choice": [{"question": "Which?", "options": ["a", "b"], "answer": "B"}],
    "reasoning-gym": [{"question": "1 + 1?", "answer": "2", "metadata": {}, "dataset": "chain_sum"}],
    "nemotron-if": [{"prompt": "Sing.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}],
    "ifeval": [{"prompt": "Sing.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}],
    "gpqa": [
        {
            "Question": "Which is a metal?",
            "Correct Answer": "iron",
            **{f"Incorrect Answer {n}": name for n, name in ((1, "neon"), (2, "argon"), (3, "boron"))},
        }
    ],
    "scp-116k": pairs(6),
}


def value_of(words: Words, option: str) -> str | None:
    return words[words.index(option) + 1] if option in words else None


def on_rows_made_here(words: Words, place: Path) -> Words:
    """A command of `prorl data prepare` on stand-ins; what the package makes is made in small."""
    given = [*words, "--check", "0"]
    source, origin = words[3], value_of(words, "--from")
    if source == "paper":
        published.make_all(place / "published")
        return [*given, "--from", "published", "--scale", "0.0001", "--agreement", "none", "--workers", "1"]
    if source == "reasoning-gym":
        (place / "graph_color.yaml").write_text("tasks:\n  graph_color:\n")
        return [*given, *(["--holdout", "2"] if origin else ["--size", "8", "--holdout", "2"])]
    if origin == "hub" and source not in ROWS:
        published.make_all(place / "published")
        given[given.index("--from") + 1] = f"published/{source}"
    elif origin is not None and not Path(origin).exists():
        file = write_lines(place / (f"{source}.jsonl" if origin == "hub" else origin), ROWS[source])
        given[given.index("--from") + 1] = str(file)
    if (against := value_of(words, "--against")) is not None:
        (place / against).parent.mkdir(parents=True)
        write_lines(place / against, [{"prompt": "What?"}])
    return given


def all_folders(words: Words) -> bool:
    """Makes all of the paper's data, as tests/data/test_prepare_paper.py does with the same stand-ins."""
    return words[2:4] == ["prepare", "paper"]


@commands_of("prorl data", slow=all_folders)
def test_data_is_prepared(words: Words, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On rows made here; a judge is a real HTTP server."""
    if words[2] == "sources":
        done(words[1:])
        assert "deepscaler" in capsys.readouterr().out
        return
    given = on_rows_made_here(words, place)
    judge = Judge()
    try:
        if "--judge-url" in words:
            threading.Thread(target=judge.serve_forever, daemon=True).start()
            for option, value in (("--judge-url", judge.url), ("--judge-model", MODEL)):
                given[given.index(option) + 1] = value
        done(given[1:])
    finally:
        if "--judge-url" in words:
            judge.shutdown()
        judge.server_close()
    told, out = capsys.readouterr().out, Path(str(value_of(words, "--out")))
    if "--estimate" in words:
        assert "requests" in told
    elif words[3] == "paper":
        assert {path.name for path in out.iterdir()} == set(PAPER)
    else:
        assert json.loads((out / "manifest.json").read_text())["counts"]["kept"] > 0
    if "my-problems.jsonl" in words:  # the page shows the last lines
        [shown] = [text for text in blocks(ROOT / "docs" / "tutorial" / "data.md", "text") if "data.train" in text]
        assert told.endswith(shown)


def test_the_page_tells_the_columns_of_every_source() -> None:
    """Of these rows each is taken, and every column stands in the table."""
    rows = re.findall(
        r"^\| (`[\w`, -]+) \| `\w+` \| (.+?) \| .+ \|$", (ROOT / "docs" / "tutorial" / "data.md").read_text(), re.M
    )
    columns = {name: set(re.findall(r"`([^`]+)`", row)) for names, row in rows for name in re.findall(r"[\w-]+", names)}
    of_the_hub = {name for name, source in SOURCES.items() if source.columns}  # docs/howto/prepare_data.md has theirs
    assert set(columns) <= set(SOURCES)
    assert set(SOURCES) - set(columns) <= of_the_hub
    for source, [row, *_] in ROWS.items():
        told = columns[source] | {"Incorrect Answer 2", "Incorrect Answer 3", "id", "domain"}
        assert set(row) - told == set()
        assert isinstance(SOURCES[source].convert(Row("f", 1, row)), Draft)


def test_a_bad_row_is_named_as_the_page_says(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    [row] = [json.loads(text) for text in blocks(ROOT / "docs" / "tutorial" / "data.md", "json")]
    write_lines(place / "my-problems.jsonl", [*[row] * 11, {"problem": row["problem"], "solution": row["answer"]}])
    [shown] = [text for text in blocks(ROOT / "docs" / "tutorial" / "data.md", "text") if ":12:" in text]
    words = ["data", "prepare", "math", "--from", "my-problems.jsonl", "--out", "prepared/mine"]
    assert cli.main(words) == 4
    assert shown.strip() in caplog.text


@commands_of("rewards score")
def test_requests_are_judged(words: Words, place: Path) -> None:
    done(words[1:])
    [verdict] = read_lines(place / "verdicts.jsonl")
    assert verdict["score"] == 1.0


@commands_of("prorl import-hf")
def test_a_model_is_imported(words: Words, place: Path) -> None:
    write_model(place / words[2], QWEN2)
    done(words[1:])
    assert (place / words[3] / "state.json").is_file()


@commands_of("prorl export-hf")
def test_a_run_is_exported(words: Words, place: Path) -> None:
    """Its newest checkpoint is an imported one here."""
    write_model(place / "model", QWEN2)
    (place / words[2] / "checkpoints").mkdir(parents=True)
    done(["import-hf", "model", f"{words[2]}/checkpoints/step-000010"])
    done(words[1:])
    assert (place / words[3] / "model.safetensors").is_file()


@commands_of("stage.sbatch", slow=lambda words: words[:2] != ["sbatch", "slurm/stage.sbatch"])
def test_a_job_is_rendered(words: Words, tmp_path: Path) -> None:
    """The script itself with --dry-run: sbatch would start it on the nodes that its flags ask for."""
    given = with_model([word for word in stage_words(words) if word != "--dry-run"], tmp_path)
    touch_prepared(tmp_path / "prepared")
    given += [f"run_dir={tmp_path / 'run'}", f"data.folder={tmp_path / 'prepared'}"]
    told = subprocess.run(
        ["bash", "slurm/stage.sbatch", *given, "--dry-run"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PRORL_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert "srun" in told.stdout


@commands_of("df")
def test_others(words: Words, place: Path) -> None:
    assert "runs" in words
    subprocess.run(words, cwd=place, capture_output=True, timeout=60, check=True)


# --- with engines and ranks ------------------------------------------------------------------------------------------


def on_gpus(words: Words) -> bool:
    """Nodes with GPUs, or a Slurm job of several: such a command is parsed and its configuration checked, no more."""
    return bool({"cluster=h100_4x8", "cluster=h100_1x8", "cluster=gpu_1"} & set(words))


@commands_of(*WHOLE, "plugins.md", "prorl plan", "prorl launch", "prorl data")
def test_what_takes_long_is_a_command_at_least(words: Words, place: Path) -> None:
    """Parsed by the real parser; overrides are composed and checked by the real loader."""
    if Path(words[0]).name != "prorl":
        return
    new_plugin("word_count", Path("word_count"))  # the data of docs/tutorial/plugins.md
    prepared(place)
    arguments = cli._parse(with_model(words, place)[1:])
    if overrides := [text for text in getattr(arguments, "overrides", []) if "=" in text]:
        more = [f"{BASE}=null"] if words[1] == "evaluate" else []  # names its model itself
        jobs = words[1] == "launch" and "--here" not in words
        more += [f"cluster={CLUSTER}"] if jobs and not any(text.startswith("cluster=") for text in overrides) else []
        settings.load([*more, *overrides])


class Story:
    """One command after the other, in processes of their own, in a folder that has the environments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list["subprocess.Popen[str]"]()
        (folder / ".venv").symlink_to(ROOT / ".venv")

    def start(self, words: Words, *more: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "nemo_prorl.cli", *words[1:], *more]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (self.folder / f"said-{len(self.started)}.log").open("w") as log:
            self.started.append(
                subprocess.Popen(command, cwd=self.folder, env=env, text=True, stdout=subprocess.PIPE, stderr=log)
            )
        return self.started[-1]

    def run(self, words: Words, *more: str, code: int = 0) -> str:
        process = self.start(words, *more)
        out, _ = process.communicate(timeout=900)
        log = (self.folder / f"said-{len(self.started) - 1}.log").read_text()
        assert process.returncode == code, f"{shlex.join(words)}: {out[-2000:]}\n{log[-3000:]}"
        return out

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


def of_way(way: str) -> list[Words]:
    return [words for page, words in COMMANDS if way_of(page, words) == way and not on_gpus(words)]


[TRAIN] = [words for _, words in COMMANDS if words[1:] == ["train", "run_dir=runs/laptop"]]
STEPS = 30  # more than it makes until its requests are served
LAPTOP = [*SMALL, f"trainer.grpo.max_steps={STEPS}"]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """`runs/laptop`, smaller than in docs/tutorial/laptop.md, with the requests of docs/howto/prolonged.md."""
    if not (ROOT / ".venv" / "rollout").is_dir():
        pytest.skip("no rollout environment: make setup")
    made = Story(tmp_path_factory.mktemp("story"))
    try:
        job = made.start(TRAIN, *LAPTOP)
        metrics = made.folder / "runs" / "laptop" / "metrics.jsonl"

        def begun() -> bool:
            assert job.poll() is None, (made.folder / "said-0.log").read_text()[-3000:]
            return metrics.exists() and metrics.stat().st_size > 0

        Deadline(600, "the first step").wait_until(begun, every=0.2)
        asked = [words for words in of_way("prorl control") if words[2] == "runs/laptop"]
        assert [words[3] for words in asked] == ["validate", "checkpoint", "stop"]
        for words in asked:
            made.run(words)  # 0: the run says that it is done
        assert job.wait(300) == 75
        yield made
    finally:
        made.end()


HEAVY = [pytest.mark.slow, pytest.mark.nemo, pytest.mark.vllm, pytest.mark.timeout(1800)]


def heavy(test: Any) -> Any:
    for mark in HEAVY:
        test = mark(test)
    return test


@heavy
def test_the_pages_about_evaluation(story: Story) -> None:
    """In their order; two prompts of each benchmark, one sample."""
    write_lines(story.folder / "my-test.jsonl", [REQUEST])
    server = Address(0.0)
    try:
        for words in of_way("prorl evaluate"):
            few = [] if {"--compare", "--manifest"} & set(words) else ["--limit", "2", "--samples", "1"]
            given = [server.url if word.startswith("http://") else word for word in words]
            given = ["tiny" if before == "--model" else word for before, word in zip(["", *given], given, strict=False)]
            out = story.run(given, *few)
            assert "laptop_gcd" in out or "acre" in out
            assert "--manifest" not in words or out.splitlines()[-1].startswith("equal to")
    finally:
        server.process.kill()
        server.process.communicate()


@heavy
def test_the_checkpoints_of_a_run_are_evaluated_beside_it(story: Story) -> None:
    """Those that it makes meanwhile: the run goes on, and the watch ends with it."""
    run = story.folder / "runs" / "laptop"
    job = story.start(TRAIN, *LAPTOP)
    [words] = of_way("prorl watch")
    story.run(words, "--limit", "2", "--samples", "1", "--every", "10")
    assert job.wait(60) == 0
    found = [json.loads(file.read_text()) for file in sorted(run.glob("evaluations/step-*/results.json"))]
    assert {one["model"]["step"] for one in found} <= set(range(0, STEPS + 1, 10))
    assert found[-1]["model"]["step"] == STEPS
    assert all({"laptop_gcd", "laptop_arithmetic"} == set(one["benchmarks"]) for one in found)


@heavy
def test_the_starting_model_is_probed(story: Story) -> None:
    """A small model with random weights in place of the page's model."""
    shape = next(iter(MODELS.values())) | {"hidden_size": 128, "max_position_embeddings": 512}
    model = write_model(story.folder / "models" / "SmolLM2-135M-Instruct", shape)
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    [words] = of_way("prorl probe")
    assert "instructions: " in story.run(words, "--prompts", "2", "--samples", "2")


@heavy
def test_your_own_data_is_trained_on(story: Story) -> None:
    """docs/tutorial/data.md from its first command to a run, smaller."""
    write_lines(
        story.folder / "my-problems.jsonl", [{"problem": f"{n} plus 25?", "answer": str(n + 25)} for n in range(200)]
    )
    [prepare] = [words for _, words in COMMANDS if "my-problems.jsonl" in words]
    story.run(prepare)
    [plan, train] = [
        words for _, words in COMMANDS if any("prepared/mine" in word for word in words) and words != prepare
    ]
    assert "mine" in story.run(plan)
    without = ("data.", "trainer.grpo.max_steps", "trainer.trace_steps")
    few = [word for word in SMALL if not word.startswith(without)]
    story.run(train, *few, "trainer.grpo.max_steps=2")
    lines = (story.folder / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert [sorted(key for key in json.loads(line) if key.startswith("validation/")) for line in lines][-1] == [
        "validation/all",
        "validation/mine",
    ]


@heavy
def test_the_doctor_and_its_preflight(story: Story) -> None:
    for words in of_way("prorl doctor"):
        small = LAPTOP if "run_dir=runs/laptop" in words else []
        out = story.run(words, *small, *(["--rows", "2"] if "--preflight" in words else []))
        assert "sandbox" in out or "--preflight" in words


@heavy
def test_the_live_report(story: Story) -> None:
    for words in of_way("report --serve"):
        process = story.start(words, "--port", "0")
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)  # as Ctrl-C, which a background job does not hear
        assert process.wait(30) == 0
