"""`prorl data prepare SOURCE --from PATH --out DIR`, and `prorl data sources`."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nemo_prorl.errors import ConfigError

_AGREEMENTS = ("judge", "grader", "none")


def add_parser(commands: Any) -> None:
    """Adds `data` with its own commands to the main command line."""
    parser = commands.add_parser("data", help="make prompt records of public data sets and of files like them")
    inner = parser.add_subparsers(required=True, metavar="COMMAND")
    listed = inner.add_parser("sources", help="the data sets that are known: task, content, licence, where they lie")
    listed.set_defaults(run_command=_sources)
    text = "make prompt records of a data set: DIR/train.jsonl, validation.jsonl, dropped.jsonl and manifest.json"
    one = inner.add_parser("prepare", help=text, description=text)
    one.set_defaults(run_command=run)
    one.add_argument("source", metavar="SOURCE", help="one of `prorl data sources`")
    one.add_argument("--from", dest="origin", metavar="PATH", help="its file or folder, or 'hub' (Hugging Face)")
    one.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to write")
    one.add_argument("--name", help="begins the records' ids; default: the source's name")
    one.add_argument("--size", type=_count, metavar="N", help="so many records, chosen by the seed; default: all")
    one.add_argument("--holdout", type=_held, metavar="N|all", help="so many of them for validation")
    one.add_argument("--limit", type=_count, metavar="N", help="read the first N rows only, to try something out")
    one.add_argument("--seed", type=_count, default=0, help="of these choices, and of puzzles (default 0)")
    one.add_argument(
        "--prompt", choices=("messages", "text"), default="messages", help="for the chat template, or as it is"
    )
    one.add_argument("--format", dest="form", choices=("jsonl", "parquet"), default="jsonl")
    one.add_argument("--field", action="append", default=[], metavar="NAME=COLUMN", help="a column of another name")
    one.add_argument("--licence", default="", help="of the data, for the manifest")
    one.add_argument("--revision", help="with --from hub: a commit, tag or branch")
    one.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a model folder, to count tokens with")
    one.add_argument("--max-prompt-tokens", type=_count, metavar="N", help="longer prompts are dropped")
    one.add_argument(
        "--against", action="append", default=[], type=Path, metavar="FILE", help="an evaluation set to keep clear of"
    )
    one.add_argument("--ngram", type=_count, default=13, metavar="N", help="words in a row in common (default 13)")
    one.add_argument(
        "--overlap", type=float, default=0.6, metavar="X", help="and this share of the shorter text (default 0.6)"
    )
    one.add_argument(
        "--check", type=_all_or_count, default=200, metavar="N|all", help="so many gold answers judged (default 200)"
    )
    one.add_argument(
        "--workers", type=_count, default=1, help="processes that judge them, and that make puzzles (default 1)"
    )
    one.add_argument("--unsafe-no-sandbox", action="store_true", help="judge programs where no sandbox holds")
    _add_judge(one.add_argument_group("do two solutions agree (scp-116k)"))


def _add_judge(group: Any) -> None:
    group.add_argument("--agreement", choices=_AGREEMENTS, default="judge", help="who says so (default judge)")
    group.add_argument("--judge-url", metavar="URL", help="an OpenAI-compatible API, such as http://host:8000/v1")
    group.add_argument("--judge-model", metavar="NAME", help="the model's name there; a key goes into PRORL_JUDGE_KEY")
    group.add_argument("--judge-workers", type=_count, default=16, metavar="N", help="requests at a time (default 16)")
    group.add_argument(
        "--judge-deadline-s", type=float, default=300.0, metavar="S", help="of one verdict (default 300)"
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)


def _all_or_count(text: str) -> int | None:
    return None if text == "all" else _count(text)


def _held(text: str) -> int:
    from nemo_prorl.data.prepare.job import ALL

    return ALL if text == "all" else _count(text)


def run(arguments: argparse.Namespace) -> int:
    """0 when the folder is complete.  Raises ConfigError, DataError and others, whose `exit_code` says which."""
    options = _options(arguments)
    from nemo_prorl.data.prepare import job

    manifest = job.prepare(options, ["prorl", *sys.argv[1:]])
    sys.stdout.write(job.summary(options, manifest))
    return 0


def _options(arguments: argparse.Namespace) -> Any:
    """Checked against each other; raises ConfigError that names the option."""
    from nemo_prorl.data.prepare.job import PrepareOptions
    from nemo_prorl.data.prepare.sources import source_of

    source = source_of(arguments.source)
    if (arguments.tokenizer is None) != (arguments.max_prompt_tokens is None):
        raise ConfigError("--tokenizer and --max-prompt-tokens belong together: give both, or none")
    for option in ("ngram", "workers", "judge_workers"):
        if getattr(arguments, option) < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {getattr(arguments, option)}: must be at least 1")
    if not 0 <= arguments.overlap <= 1:
        raise ConfigError(f"--overlap {arguments.overlap:g}: must be from 0 (any words in a row count) to 1")
    given = {field.name: getattr(arguments, field.name) for field in fields(PrepareOptions) if field.name in arguments}
    wanted = source.judged and arguments.agreement == "judge"
    made = {"source": source, "name": arguments.name or source.name, "columns": _columns(arguments.field)}
    return PrepareOptions(**{**given, **made, "judge": _judge(arguments) if wanted else None})


def _columns(given: list[str]) -> dict[str, str]:
    columns = {}
    for text in given:
        own, equals, theirs = text.partition("=")
        if not (own and equals and theirs):
            raise ConfigError(f"--field {text}: must be NAME=COLUMN, such as answer=final_answer")
        columns[own] = theirs
    return columns


def _judge(arguments: argparse.Namespace) -> Any:
    from nemo_prorl.data.prepare.judge import JudgeOptions

    url, model = arguments.judge_url, arguments.judge_model
    if not url or not model:
        raise ConfigError(
            f"{arguments.source} keeps problems whose two solutions agree: name a judge with --judge-url and "
            "--judge-model, or say --agreement grader (boxed answers are compared; drops what has none) or none"
        )
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(f"--judge-url {url}: must be the base of an API, such as http://host:8000/v1")
    if not 0 < arguments.judge_deadline_s <= 86_400:
        raise ConfigError(f"--judge-deadline-s {arguments.judge_deadline_s:g}: must be above 0, at most 86400")
    return JudgeOptions(url, model, arguments.judge_workers, arguments.judge_deadline_s)


def _sources(_: argparse.Namespace) -> int:
    from nemo_prorl.data.prepare.sources import SOURCES

    for source in SOURCES.values():
        lies = f"hub: {source.repo}" if source.repo else "made here, or --from a file" if source.size else "a file"
        sys.stdout.write(f"{source.name:<14} {source.task:<13} {source.what}\n{'':<28} {lies}; {source.licence}\n")
    return 0
