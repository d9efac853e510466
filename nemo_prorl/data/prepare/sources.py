"""The data sets that `prorl data prepare` knows, with converter, location and licence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nemo_prorl.data.prepare import answers, contests, instructions, livecodebench, programs, puzzles
from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.rows import Row
from nemo_prorl.errors import ConfigError

ALL = -1  # --holdout all


@dataclass(frozen=True)
class Source:
    """A known data set.

    `what`: description of the content, printed by `prorl data sources`.
    `licence`: as the publisher states it for the data set; single problems may have another licence.
    `repo`, `files`: location on the Hugging Face hub; empty if --from must name a file.
    `size`: the paper's number of problems, only for a generated data set.
    `holdout`: default of --holdout; ALL for a benchmark.
    `revision`: commit on the hub that a public project pins, too; "" means the newest at the first download, which the
        manifest then records.
    `columns`: the columns as published; `known_from`: where columns, revision and numbers are known from.
    `rows`, `megabytes`: size of `files` as published; None if unknown.
    `gated`: the publisher asks for an account and the acceptance of terms.
    `parts`: the values of --only, each with the patterns of its files; no patterns: all files of the source.
    `part_column`: the column that names a row's part; "" if the files alone distinguish the parts.
    `date_column`: the column with a row's date, YYYY-MM-DD first; `since`, `until`: defaults of --since and --until.
    `selection`: makes the function that returns whether a row is read at all; None: each row is read.
    """

    name: str
    task: str
    what: str
    licence: str
    convert: Callable[[Row], Draft | Drop]
    repo: str = ""
    files: tuple[str, ...] = ()
    judged: bool = False  # problems have two solutions, which must agree
    size: int | None = None
    holdout: int = 0
    revision: str = ""
    columns: tuple[str, ...] = ()
    known_from: str = ""
    rows: int | None = None
    megabytes: float | None = None
    gated: bool = False
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    part_column: str = ""
    date_column: str = ""
    since: str = ""
    until: str = ""
    selection: Callable[[], Callable[[Row], bool]] | None = None


_MATH = answers.final_answer("math")
_UNKNOWN = "that of the file"
_OF_CONTESTS = "MIT (data card); problems belong to their contests"
VERIFIED = "public projects that pin this commit and read these columns"
_EURUS_REVISION = "9776b13264b5aaa0b16495fcf086a0a8d86fd655"
_EURUS_COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
_TRAINING = (
    Source(
        "deepscaler",
        "math",
        what="DeepScaleR: 40k competition problems with answers",
        licence=_OF_CONTESTS,
        convert=_MATH,
        repo="agentica-org/DeepScaleR-Preview-Dataset",
        files=("deepscaler.json",),
        revision="b6ae8c60f5c1f2b594e2140b91c49c9ad0949e29",
        columns=("problem", "answer", "solution"),
        known_from=VERIFIED,
    ),
    Source(
        "eurus2-rl",
        "code",
        what="the programming problems of Eurus-2-RL",
        licence="MIT (data card); problems belong to their contests",
        convert=programs.eurus,
        repo="PRIME-RL/Eurus-2-RL-Data",
        files=("train*.parquet", "**/train*.parquet"),
        revision=_EURUS_REVISION,
        columns=_EURUS_COLUMNS,
        known_from=VERIFIED,
        rows=480_537,
    ),
    Source(
        "scp-116k",
        "stem",
        what="SCP-116K: science, kept where R1's answer agrees with the source's",
        licence="CC BY-NC-SA 4.0 (data card)",
        convert=answers.scp,
        repo="EricLu/SCP-116K",
        files=("*.jsonl", "*.parquet"),
        judged=True,
        columns=("domain", "problem", "extract_solution", "r1_response", "r1_reasoning_content"),
        known_from="a data set derived from it; an earlier version has matched_solution; the commit is not verified",
        rows=274_000,
    ),
    Source(
        "reasoning-gym",
        "puzzles",
        "reasoning-gym: 37,000 training and 9,600 validation puzzles of 96 tasks, generated; or a file of entries",
        "Apache-2.0 (package reasoning-gym)",
        puzzles.entry,
        size=37_000,
        holdout=9_600,
    ),
    Source(
        "nemotron-if",
        "instructions",
        what="the prompts in IFEval's form of Llama-Nemotron's RL data",
        licence="CC BY 4.0 (data card)",
        convert=instructions.ifeval,
        repo="nvidia/Llama-Nemotron-Post-Training-Dataset",
        files=("RL/instruction_following/*.jsonl",),
        revision="ab2a40d258a6a4d9d4c277d702aeea445081766c",
        columns=("input", "args", "category"),
        known_from=VERIFIED,
        rows=56_339,
    ),
)
_BENCHMARKS = (
    Source(
        "aime24",
        "math",
        what="AIME 2024, I and II",
        licence="none stated; problems belong to the MAA",
        convert=contests.aime,
        repo="HuggingFaceH4/aime_2024",
        files=("data/train-*.parquet",),
        holdout=ALL,
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        columns=("id", "problem", "solution", "answer", "url", "year"),
        known_from=VERIFIED,
        rows=30,
    ),
    Source(
        "aime25",
        "math",
        what="AIME 2025, I and II",
        licence="Apache-2.0 (data card); problems belong to the MAA",
        convert=contests.aime,
        repo="math-ai/aime25",
        files=("test.jsonl",),
        holdout=ALL,
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        columns=("problem", "answer", "id"),
        known_from=VERIFIED,
        rows=30,
        megabytes=0.02,
    ),
    Source(
        "amc",
        "math",
        what="AMC 12 of 2022 (43) and 2023 (40), as problems with a whole number",
        licence="Apache-2.0 (data card); problems belong to the MAA",
        convert=_MATH,
        repo="AI-MO/aimo-validation-amc",
        files=("data/train-*.parquet",),
        holdout=ALL,
        revision="69d78a4a2c840e82d69af6bc742bda09005f6316",
        columns=("id", "problem", "answer", "url"),
        known_from=VERIFIED,
        rows=83,
        megabytes=0.02,
    ),
    Source(
        "math500",
        "math",
        what="500 problems of the test split of MATH",
        licence="MIT (repository hendrycks/math)",
        convert=_MATH,
        repo="HuggingFaceH4/MATH-500",
        files=("test.jsonl",),
        holdout=ALL,
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        columns=("problem", "solution", "answer", "subject", "level", "unique_id"),
        known_from=VERIFIED,
        rows=500,
    ),
    Source(
        "minerva",
        "math",
        what="undergraduate problems of MIT OpenCourseWare",
        licence="CC BY-NC-SA 4.0 (the courses)",
        convert=_MATH,
        repo="math-ai/minervamath",
        files=("test.jsonl",),
        holdout=ALL,
        revision="ee46ddc498933b1977577953250ca5c66be64f96",
        columns=("question", "answer"),
        known_from=VERIFIED,
        rows=272,
    ),
    Source(
        "olympiadbench",
        "math",
        what="OlympiadBench: open-ended English competition problems without images",
        licence="Apache-2.0 (data card); problems belong to their contests",
        convert=contests.olympiad,
        repo="Hothan/OlympiadBench",
        files=("OlympiadBench/OE_TO_maths_en_COMP/*.parquet",),
        holdout=ALL,
        revision="91184b52131e7fc9455fef848035173aea8cc01a",
        columns=("id", "question", "final_answer", "context", "is_multiple_answer", "unit", "answer_type", "error"),
        known_from=VERIFIED,
        rows=674,
    ),
    Source(
        "gpqa",
        "stem",
        what="GPQA diamond, as a choice of four",
        licence="CC BY 4.0 (data card); not to be published in plain text",
        convert=answers.gpqa,
        repo="Idavidrein/gpqa",
        files=("gpqa_diamond.csv",),
        holdout=ALL,
        revision="633f5ee89ab8ad4522a9f850766b73f62147ffdd",
        columns=("Record ID", "Question", "Correct Answer", "Incorrect Answer 1", "… 2", "… 3"),
        known_from=VERIFIED,
        rows=198,
        megabytes=1.4,
        gated=True,
    ),
    Source(
        "gpqa-main",
        "stem",
        what="GPQA's main set, as a choice of four",
        licence="CC BY 4.0 (data card); not to be published in plain text",
        convert=answers.gpqa,
        repo="Idavidrein/gpqa",
        files=("gpqa_main.csv",),
        holdout=ALL,
        revision="633f5ee89ab8ad4522a9f850766b73f62147ffdd",
        columns=("Record ID", "Question", "Correct Answer", "Incorrect Answer 1", "… 2", "… 3"),
        known_from=VERIFIED,
        rows=448,
        gated=True,
    ),
    Source(
        "gpqa-open",
        "stem",
        what="GPQA diamond without options: the data set that the paper's footnote names",
        licence="none stated; GPQA is CC BY 4.0, not to be published in plain text",
        convert=answers.gpqa_open,
        repo="spawn99/GPQA-diamond-ClaudeR1",
        files=("*.parquet", "*.jsonl", "*.json"),
        holdout=ALL,
        columns=("record_id", "question", "correct_answer", "correct_explanation", "model_responses", "metadata"),
        known_from="the code that published it; the commit is not verified",
        rows=198,
    ),
    Source(
        "ifeval",
        "instructions",
        what="IFEval's prompts, or others in its form",
        licence="Apache-2.0 (data card)",
        convert=instructions.ifeval,
        repo="google/IFEval",
        files=("ifeval_input_data.jsonl",),
        holdout=ALL,
        revision="966cd89545d6b6acfd7638bc708b98261ca58e84",
        columns=("key", "prompt", "instruction_id_list", "kwargs"),
        known_from=VERIFIED,
        rows=541,
        megabytes=0.2,
    ),
    Source(
        "eurus2-rl-validation",
        "code",
        what="the programming problems of Eurus-2-RL's validation set: four benchmarks of the paper",
        licence="MIT (data card); problems belong to their contests",
        convert=programs.eurus,
        repo="PRIME-RL/Eurus-2-RL-Data",
        files=("validation*.parquet", "**/validation*.parquet"),
        holdout=ALL,
        revision=_EURUS_REVISION,
        columns=_EURUS_COLUMNS,
        known_from=VERIFIED,
        rows=2_048,
        parts={"apps": (), "codecontests": (), "codeforces": (), "taco": ()},
        part_column="data_source",
    ),
    Source(
        "humanevalplus",
        "code",
        what="HumanEval+: 164 functions with the tests of EvalPlus",
        licence="Apache-2.0 (data card)",
        convert=programs.humaneval,
        repo="evalplus/humanevalplus",
        files=("data/test-*.parquet",),
        holdout=ALL,
        revision="d32357cf319e50e9c8d8dab5ea876c72b0fd321b",
        columns=("task_id", "prompt", "canonical_solution", "entry_point", "test"),
        known_from="EvalPlus' tool that writes this form, and public projects that pin this commit",
        rows=164,
    ),
    Source(
        "livecodebench",
        "code",
        what="LiveCodeBench's code generation (lite): release_v5 of the paper's time; --only, --since, --until: others",
        licence="problems belong to their contests",
        convert=livecodebench.livecodebench,
        repo="livecodebench/code_generation_lite",
        files=livecodebench.RELEASES["release_v5"],
        holdout=ALL,
        revision="0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
        columns=livecodebench.COLUMNS,
        known_from="LiveCodeBench's repository, and public projects that pin this commit",
        rows=880,
        megabytes=4_352.0,
        parts=livecodebench.RELEASES,
        date_column="contest_date",
        since=livecodebench.SINCE,
        until=livecodebench.UNTIL,
    ),
    Source(
        "codeforces-submissions",
        "code",
        what="Codeforces-Python-Submissions: its problems, each with the first accepted program",
        licence="problems belong to Codeforces",
        convert=programs.codeforces,
        repo="MatrixStudio/Codeforces-Python-Submissions",
        files=("data/*.parquet",),
        columns=programs.CODEFORCES_COLUMNS,
        known_from="public programs that read it; the commit and the types of the columns are not verified",
        selection=programs.first_accepted,
    ),
)
_FORMS = (
    Source("math", "math", "a file of `problem` and `answer`", _UNKNOWN, _MATH),
    Source("stem", "stem", "a file of `question` and `answer`, with `unit`", _UNKNOWN, answers.final_answer("stem")),
    Source("choice", "stem", "a file of `question`, `options` and `answer`, a letter", _UNKNOWN, answers.choice),
    Source("code", "code", "a file of `problem` and `tests`, or APPS' `input_output`", _UNKNOWN, programs.tested),
    Source(
        "humaneval",
        "code",
        "HumanEval, or HumanEval+ with the arguments of EvalPlus",
        "MIT (repository openai/human-eval); EvalPlus' tests Apache-2.0",
        programs.humaneval,
    ),
    Source("mbpp", "code", "MBPP", "CC BY 4.0 (data card)", programs.mbpp),
    Source("leetcode", "code", "LeetCode's problems as rLLM has them", "problems (c) LeetCode", programs.leetcode),
)
SOURCES = {source.name: source for source in (*_TRAINING, *_BENCHMARKS, *_FORMS)}


def source_of(name: str) -> Source:
    """Return a known data set.  Raises ConfigError that lists the known names."""
    if name not in SOURCES:
        raise ConfigError(f"unknown data source {name!r}; known: {', '.join(SOURCES)}")
    return SOURCES[name]
