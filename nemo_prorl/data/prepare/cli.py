"""`prorl data prepare SOURCE --from PATH --out DIR`, and `prorl data sources`."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nemo_prorl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_prorl.data.prepare.finished import Parser

_AGREEMENTS = ("judge", "grader", "none")


def add_parser(commands: Any) -> None:
    """Add the command `data` and its subcommands to the main command line."""
    parser = commands.add_parser("data", help="convert data sets, from the hub or from files, into prompt records")
    inner = parser.add_subparsers(required=True, metavar="COMMAND")
    listed = inner.add_parser("sources", help="list the known data sets: task, content, location, licence")
    listed.set_defaults(run_command=_sources)
    text = "convert a data set into prompt records: DIR/train.jsonl, validation.jsonl, dropped.jsonl, manifest.json"
    prepare = inner.add_parser("prepare", help=text, description=text)
    prepare.set_defaults(run_command=run)
    _add_options(prepare)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "a name from `prorl data sources`; or paper: all that data=prorl and the paper's benchmarks need"
    add("source", metavar="SOURCE", help=text)
    text = "file or folder to read, or 'hub' (Hugging Face); for paper: 'hub' (default), or a folder with a folder for"
    text += " each source, FOLDER/SOURCE, with the files as published"
    add("--from", dest="origin", metavar="PATH", help=text)
    add("--out", metavar="DIR", type=Path, required=True, help="folder for the output")
    text = "only this part of the source: a data set in its files, a task of reasoning-gym, a folder of paper; default:"
    text += " everything"
    add("--only", metavar="PART", default="", help=text)
    text = "only rows from this date on; default: livecodebench: the paper's period"
    add("--since", type=_date, metavar="YYYY-MM-DD", help=text)
    add("--until", type=_date, metavar="YYYY-MM-DD", help="only rows up to this date, included; default: as --since")
    add("--name", help="prefix of the records' ids; default: --task, or SOURCE")
    add("--size", type=_count, metavar="N", help="number of records, drawn at random by --seed; default: all")
    text = "for paper: multiply all numbers of records by X, for a trial; default: 1"
    add("--scale", type=_share, default=1.0, metavar="X", help=text)
    text = "records for validation; default: all for a benchmark, 9600 for reasoning-gym, otherwise 0"
    add("--holdout", type=_holdout_count, metavar="N|all", help=text)
    add("--limit", type=_count, metavar="N", help="read only the first N rows, for a trial; default: all")
    text = "random seed of the draws of --size and --holdout, and of puzzles; default: 0"
    add("--seed", type=_count, default=0, help=text)
    _add_records(parser)
    _add_filters(parser)
    _add_judge(parser.add_argument_group("agreement of the two solutions of a problem (scp-116k)"))


def _add_records(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "prompts as messages or plain text; default: messages"
    add("--prompt", choices=("messages", "text"), default="messages", help=text)
    add("--format", dest="form", choices=("jsonl", "parquet"), default="jsonl", help="output format; default: jsonl")
    add("--field", action="append", default=[], metavar="NAME=COLUMN", help="column to read for field NAME; repeatable")
    add("--task", help="task of the records, for your own reward; prompts are the bare problems")
    text = "column with a right response, which a warm-up teaches (meta.target); default: none"
    add("--target", metavar="COLUMN", help=text)
    text = "column to keep: in the truth with --task, where a reward function finds it, otherwise in meta; repeatable"
    add("--keep", action="append", default=[], metavar="COLUMN", help=text)
    add("--licence", default="", help="licence for the manifest; default: the source's")
    add("--revision", help="commit, tag or branch for --from hub; default: the pinned commit, else the newest")


def _add_filters(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "model folder whose tokenizer counts prompt tokens; default: none"
    add("--tokenizer", type=Path, metavar="FOLDER", help=text)
    add("--max-prompt-tokens", type=_count, metavar="N", help="drop prompts with more than N tokens; default: no limit")
    text = "drop problems that overlap with FILE; repeatable"
    add("--against", action="append", default=[], type=Path, metavar="FILE", help=text)
    text = "consecutive words that an overlap has in common; default: 13"
    add("--ngram", type=_count, default=13, metavar="N", help=text)
    text = "share of the shorter text that an overlap has in common; default: 0.6"
    add("--overlap", type=float, default=0.6, metavar="X", help=text)
    text = "number of gold answers to judge; default: 200"
    add("--check", type=_all_or_count, default=200, metavar="N|all", help=text)
    text = "leave out mathematical problems whose answer is ordinary words; default: a warning counts them"
    add("--drop-worded", action="store_true", help=text)
    add("--workers", type=_count, default=1, help="processes that judge gold answers and generate puzzles; default: 1")
    text = "if no sandbox works here, run programs with all rights of this user"
    add("--unsafe-no-sandbox", action="store_true", help=text)


def _add_judge(group: Any) -> None:
    add = group.add_argument
    text = "comparison of the solutions, by a judge model or by their boxed answers (grader); default: judge"
    add("--agreement", choices=_AGREEMENTS, default="judge", help=text)
    add("--judge-url", metavar="URL", help="base URL of the judge's OpenAI-compatible API, such as http://host:8000/v1")
    text = "name of the judge's model; PRORL_JUDGE_KEY (environment variable): its API key, if needed"
    add("--judge-model", metavar="NAME", help=text)
    text = "maximum concurrent requests to the judge; default: 16"
    add("--judge-workers", type=_count, default=16, metavar="N", help=text)
    text = "maximum seconds for one verdict, retries included; default: 300"
    add("--judge-deadline-s", type=float, default=300.0, metavar="S", help=text)
    text = "print the judge's requests and tokens, and stop before the first request"
    add("--estimate", action="store_true", help=text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0; got {text!r}")
    return int(text)


def _date(text: str) -> str:
    from datetime import date

    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a date, YYYY-MM-DD; got {text!r}") from None


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, at most 1; got {text!r}")
    return value


def _all_or_count(text: str) -> int | None:
    return None if text == "all" else _count(text)


def _holdout_count(text: str) -> int:
    from nemo_prorl.data.prepare.sources import ALL

    return ALL if text == "all" else _count(text)


def run(arguments: argparse.Namespace) -> int:
    """Prepare a data set and return the exit code 0.

    Raises a ProrlError, such as DataError, for a failure; its `exit_code` is the exit code of the command.
    """
    if arguments.source == "paper":
        return _paper(arguments)
    if arguments.scale != 1:
        raise ConfigError(f"--scale {arguments.scale:g}: is for `paper`.  Fix: --size N")
    options = _options(arguments)
    from nemo_prorl.data.prepare import preparation

    if arguments.estimate:
        sys.stdout.write(preparation.estimate(options))
        return 0
    from nemo_prorl.data.prepare.finished import check_same_options, command_of, finished

    parser = _parser()
    command = command_of(parser, arguments)
    if (manifest := finished(parser, options, command)) is not None:
        sys.stdout.write(f"{options.out}: prepared already by this command, from the same data\n")
    else:
        check_same_options(parser, options, command)
        manifest = preparation.prepare(options, command)
    sys.stdout.write(preparation.summary(options, manifest))
    return 0


def _parser() -> "Parser":
    from nemo_prorl.data.prepare.finished import Parser

    parser = Parser()
    _add_options(parser)
    return parser


def _paper(arguments: argparse.Namespace) -> int:
    from nemo_prorl.data.prepare.paper import Paper

    paper = Paper(arguments, _parser(), _options)
    paper.run()
    sys.stdout.write(paper.table())
    return paper.exit_code()


def _options(arguments: argparse.Namespace) -> Any:
    """Return the options, checked against each other.  Raises ConfigError that names the wrong option."""
    from nemo_prorl.data.prepare.inputs import PrepareOptions
    from nemo_prorl.data.prepare.sources import source_of

    source = source_of(arguments.source)
    if arguments.only and arguments.only not in source.parts and source.size is None:
        known = ", ".join(source.parts) or "none"
        raise ConfigError(f"--only {arguments.only}: {source.name} has no such part; known: {known}")
    if (arguments.since or arguments.until) and not source.date_column:
        raise ConfigError(f"--since, --until: the rows of {source.name} have no date")
    if arguments.keep and (source.judged or source.size is not None):
        reason = "its truths are written later, by a judge" if source.judged else "it is generated, and has no columns"
        raise ConfigError(f"--keep {arguments.keep[0]}: {source.name} cannot keep columns: {reason}.  Fix: omit --keep")
    if (arguments.tokenizer is None) != (arguments.max_prompt_tokens is None):
        raise ConfigError("--tokenizer and --max-prompt-tokens must be used together.  Fix: give both or neither")
    for option in ("ngram", "workers", "judge_workers"):
        if getattr(arguments, option) < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {getattr(arguments, option)}: must be at least 1")
    if not 0 <= arguments.overlap <= 1:
        raise ConfigError(
            f"--overlap {arguments.overlap:g}: must be from 0 to 1; with 0, a problem is dropped if it has --ngram"
            " consecutive words in common"
        )
    values = {field.name: getattr(arguments, field.name) for field in fields(PrepareOptions) if field.name in arguments}
    needs_judge = source.judged and arguments.agreement == "judge"
    derived = {
        "source": source,
        "name": arguments.name or arguments.task or arguments.only or source.name,
        "columns": _columns(arguments.field),
    }
    return PrepareOptions(**{**values, **derived, "judge": _judge(arguments) if needs_judge else None})


def _columns(texts: list[str]) -> dict[str, str]:
    columns = {}
    for text in texts:
        name, equals, column = text.partition("=")
        if not (name and equals and column):
            raise ConfigError(f"--field {text}: must be NAME=COLUMN, such as answer=final_answer")
        columns[name] = column
    return columns


def _judge(arguments: argparse.Namespace) -> Any:
    from nemo_prorl.data.prepare.judge import JudgeOptions

    url, model = arguments.judge_url, arguments.judge_model
    if not url or not model:
        raise ConfigError(
            f"{arguments.source} needs a judge, to keep problems whose two solutions agree.  Fix: set --judge-url and "
            "--judge-model, or --agreement grader (compares boxed answers, drops problems without), or --agreement none"
        )
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(f"--judge-url {url}: must be the base of an API, such as http://host:8000/v1")
    if not 0 < arguments.judge_deadline_s <= 86_400:
        raise ConfigError(f"--judge-deadline-s {arguments.judge_deadline_s:g}: must be above 0, at most 86400")
    return JudgeOptions(url, model, arguments.judge_workers, arguments.judge_deadline_s)


def _sources(_: argparse.Namespace) -> int:
    from nemo_prorl.data.prepare.sources import SOURCES

    for source in SOURCES.values():
        location = f"hub: {source.repo}" if source.repo else "generated, or --from a file" if source.size else "a file"
        sys.stdout.write(f"{source.name:<14} {source.task:<13} {source.what}\n{'':<28} {location}; {source.licence}\n")
    return 0
