"""`prorl replay`: the rules for hard resets over a recorded run, when they would have spoken and why."""

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
from nemo_prorl.lifecycle.records import Journal
from nemo_prorl.lifecycle.summary import standard_errors
from nemo_prorl.planning.columns import columns

_RULES = "trainer.resets.rules"


def add_parser(commands: Any) -> None:
    """Adds `replay` to the main command line."""
    text = "run the rules for hard resets over a recorded run: when they would have spoken, and why"
    parser = commands.add_parser("replay", help=text, description=text)
    parser.add_argument("metrics", metavar="METRICS", type=Path, help="a run directory, or a metrics.jsonl")
    parser.add_argument("--rules", metavar="KEY=VALUE", nargs="+", default=[], help=f"settings under {_RULES}")
    parser.add_argument("--mode", choices=("auto", "advise"), default="auto", help="auto: what asks counts as a reset")
    parser.add_argument("--json", action="store_true", help="one JSON object a finding instead of the table")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """0 whatever was found.  Raises DataError (file and line) or ConfigError (key and value)."""
    file = args.metrics / "metrics.jsonl" if args.metrics.is_dir() else args.metrics
    lines = read_lines(file)
    rules = read_rules(args.rules, file.parent / "config.yaml")
    errors, resets = read_journal(file.parent)
    findings = replay(lines, rules, errors, resets, act=args.mode == "auto")
    if args.json:
        sys.stdout.write("".join(json.dumps(asdict(finding)) + "\n" for finding in findings))
    else:
        sys.stdout.write(table(findings, lines, sorted(resets), bool(errors)))
    return 0


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, in order of steps, without a last line that a kill cut."""
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
            raise DataError(f"{file}:{number}: step: must be a whole number")
        if lines and step <= lines[-1]["step"]:
            raise DataError(f"{file}:{number}: step: {step} does not come after {lines[-1]['step']}")
        lines.append(line)
    if not lines:
        raise DataError(f"{file}: holds no step")
    return lines


def read_rules(overrides: list[str], config: Path) -> ResetRulesConfig:
    """Return the rules of a run's config.yaml, or the shipped ones, with overrides; checked as a configuration is."""
    from nemo_prorl import settings

    given = []
    if config.is_file():  # only these keys: its data and models need not be on this machine, nor its version be ours
        own = OmegaConf.select(OmegaConf.load(config), _RULES) or {}
        given = [f"{_RULES}.{key}={'[' + ','.join(own[key]) + ']' if key == 'asks' else own[key]}" for key in own]
    cfg = settings.load([*given, *(f"{_RULES}.{text}" for text in overrides)])
    rules: ResetRulesConfig = cfg.trainer.resets.rules
    return rules


def read_journal(folder: Path) -> tuple[dict[int, Mapping[str, float]], set[int]]:
    """Read journal.jsonl, if it exists: standard errors of validations by step and name, and the steps of resets.

    A later event of the same step counts: the run came by there again.  A reset counts where it was committed.
    """
    errors: dict[int, Mapping[str, float]] = {}
    resets: set[int] = set()
    for event in Journal(folder).events():
        if event["event"] == "resume":  # what came after was done again, or was not
            resets = {step for step in resets if step <= event["step"]}
        elif event["event"] == "validation":
            errors[event["step"]] = standard_errors(event)
        elif event["event"] == "reset_commit":
            resets.add(event["step"])
    return errors, resets


def table(findings: list[Finding], lines: list[dict[str, Any]], resets: list[int], with_errors: bool) -> str:
    """Return the findings as a table for a terminal."""
    steps = f"steps {lines[0]['step']} to {lines[-1]['step']}"
    validated = sum(any(key.startswith("validation/") for key in line) for line in lines)
    noise = "standard errors and scatter" if with_errors else "scatter (no journal with standard errors)"
    text = f"{steps}, {validated} validations, noise from {noise}\n"
    if resets:
        text += f"hard resets of the run: after steps {', '.join(map(str, resets))}\n"
    if not findings:
        return text + "no rule speaks\n"
    rows = [("step", "rule", "does", "seen")]
    rows += [(str(f.step), f.rule, "asks for a reset" if f.asks else "advises", f.what) for f in findings]
    return text + columns(rows)
