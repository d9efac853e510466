"""`prorl replay`: applies the rules for hard resets to a recorded run and shows when they would have acted, and why."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_prorl.algorithms.reset_rules import Finding, replay
from nemo_prorl.config import ResetRulesConfig
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.lifecycle.journal_events import standing
from nemo_prorl.lifecycle.run_records import Journal
from nemo_prorl.lifecycle.summary import standard_errors
from nemo_prorl.planning.columns import columns

_RULES = "trainer.resets.rules"


def add_parser(commands: Any) -> None:
    """Add `replay` to the main command line."""
    text = "apply the rules for hard resets to a recorded run: when they would have acted, and why"
    parser = commands.add_parser("replay", help=text, description=text)
    parser.add_argument("metrics", metavar="METRICS", type=Path, help="run directory or metrics.jsonl file")
    parser.add_argument(
        "--rules",
        metavar="KEY=VALUE",
        nargs="+",
        default=[],
        help=f"new values for keys of {_RULES}; default: the run's values",
    )
    mode_help = "auto: count each request for a reset as a reset; advise: do not (default: auto)"
    parser.add_argument("--mode", choices=("auto", "advise"), default="auto", help=mode_help)
    parser.add_argument("--json", action="store_true", help="print one JSON object per finding instead of the table")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings and return exit code 0, even if there are none.  Raises ConfigError and DataError."""
    file = args.metrics / "metrics.jsonl" if args.metrics.is_dir() else args.metrics
    lines = read_lines(file)
    rules = read_rules(args.rules, file.parent / "config.yaml")
    errors, resets = read_journal(file.parent)
    findings = replay(lines, rules, errors, resets, act=args.mode == "auto")
    if args.json:
        sys.stdout.write("".join(json.dumps(asdict(finding)) + "\n" for finding in findings))
    else:
        sys.stdout.write(table(findings, lines, sorted(resets), set(errors)))
    return 0


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl as dictionaries, in order of steps, without an incomplete last line.

    Raises:
        ConfigError: the file cannot be read.
        DataError: a line is not JSON or has no step, steps do not increase, or the file has no line.
    """
    try:
        texts = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(texts):
                break
            raise DataError(f"{file}:{number}: not JSON: {error}") from error
        step = line.get("step") if isinstance(line, dict) else None
        if not isinstance(step, int) or isinstance(step, bool):
            raise DataError(f"{file}:{number}: step: expected a whole number; got {step!r}")
        if lines and step <= lines[-1]["step"]:
            raise DataError(f"{file}:{number}: step: expected a number above {lines[-1]['step']}; got {step}")
        lines.append(line)
    if not lines:
        raise DataError(f"{file}: expected at least one step; got none")
    return lines


def read_rules(overrides: list[str], config: Path) -> ResetRulesConfig:
    """Return the reset rules of a run's config.yaml, or the default rules if the file does not exist, with `overrides`.

    An override is KEY=VALUE, with a key below trainer.resets.rules.  Raises ConfigError for a wrong key or value.
    """
    from nemo_prorl import settings

    saved = []
    # Only the rules are read: the run's data and models may be absent here, and another version may have written it.
    if config.is_file():
        own = OmegaConf.select(OmegaConf.load(config), _RULES) or {}
        saved = [f"{_RULES}.{key}={list(own[key]) if key == 'asks' else own[key]}" for key in own]
    cfg = settings.load([*saved, *(f"{_RULES}.{text}" for text in overrides)])
    rules: ResetRulesConfig = cfg.trainer.resets.rules
    return rules


def read_journal(folder: Path) -> tuple[dict[int, Mapping[str, float]], set[int]]:
    """Read a run's journal.jsonl; return the standard errors of its validations, and the steps of its hard resets.

    If a run repeated a step after a resume, only the repetition counts.  Both results are empty if the file does not
    exist.

    Returns:
        {step: {source: standard error of the mean reward}}, and the set of steps after which resets were made.
    """
    errors: dict[int, Mapping[str, float]] = {}
    resets: set[int] = set()
    for event in standing(Journal(folder).events()):
        if event["event"] == "validation":
            errors[event["step"]] = standard_errors(event)
        elif event["event"] == "reset_commit":
            resets.add(event["step"])
    return errors, resets


def table(findings: list[Finding], lines: list[dict[str, Any]], resets: list[int], validations: set[int]) -> str:
    """Return the findings as text: a head with the steps and resets of the run, then a table.

    Args:
        lines: lines of metrics.jsonl.
        resets: steps after which the run made hard resets.
        validations: steps of the validations in the journal, whose standard errors the rules also used; the head says
            so.  It counts them with the first one, before step 1, of which metrics.jsonl has no line.
    """
    steps = f"steps {lines[0]['step']} to {lines[-1]['step']}"
    in_lines = {line["step"] for line in lines if any(key.startswith("validation/") for key in line)}
    validated = len(in_lines | {step for step in validations if step <= lines[-1]["step"]})
    noise = "standard errors and scatter" if validations else "scatter only (no journal with standard errors)"
    text = f"{steps}, {validated} validations, noise from {noise}\n"
    if resets:
        text += f"hard resets of the run: after steps {', '.join(map(str, resets))}\n"
    if not findings:
        return text + "no findings: no rule asks for a reset or advises one\n"
    rows = [("step", "rule", "does", "seen")]
    rows += [(str(f.step), f.rule, "asks for a reset" if f.asks else "advises", f.what) for f in findings]
    return text + columns(rows)
