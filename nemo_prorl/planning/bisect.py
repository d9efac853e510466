"""`prorl bisect`: the first step, phase and object in which two runs part, from their ledgers."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.files import read_objects

if TYPE_CHECKING:  # they import torch
    from nemo_prorl.lifecycle.ledger_diff import Parting

_SHOWN_TOKENS = 8


def add_parser(commands: Any) -> None:
    """Add `bisect` to the main command line."""
    text = "compare the ledgers of two runs: the first step, phase and object in which they part"
    parser = commands.add_parser("bisect", help=text, description=text)
    parser.add_argument("first", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("second", metavar="OTHER", type=Path, help="run directory to compare with")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of sentences")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Print where the runs part; return 0 if they are equal, otherwise 1.  Raises ConfigError without ledgers."""
    from nemo_prorl.lifecycle.ledger import read_ledger
    from nemo_prorl.lifecycle.ledger_diff import Norms, parting

    first, second = read_ledger(args.first), read_ledger(args.second)
    for folder, ledger in ((args.first, first), (args.second, second)):
        if not ledger:
            raise ConfigError(f"{folder}: expected a run directory with a ledger.jsonl; it has none, or no whole step")
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ConfigError(f"{args.first} and {args.second} have no step in common")
    divergence = parting(first, second, Norms(norms_of(args.first), norms_of(args.second)))
    differences = other_settings(args.first, args.second)
    if args.json:
        value = {"equal": divergence is None, "steps": [common[0], common[-1]], "settings": differences}
        sys.stdout.write(json.dumps(value | ({} if divergence is None else asdict(divergence)), indent=1) + "\n")
    elif divergence is None:
        sys.stdout.write(f"equal in steps {common[0]} to {common[-1]}\n")
    else:
        lines = [divergence.words(), *values(args.first, args.second, divergence)]
        lines += [f"equal before: steps {common[0]} to {divergence.step - 1}"] if divergence.step > common[0] else []
        lines += [f"the configurations differ: {differences}"] if differences else []
        sys.stdout.write("\n".join(lines) + "\n")
    return 0 if divergence is None else 1


def norms_of(run_dir: Path) -> dict[int, float]:
    """Return the gradient norm of each step of a run."""
    lines = read_objects(run_dir / "metrics.jsonl")
    return {line["step"]: line["policy/grad_norm"] for line in lines if line.get("policy/grad_norm") is not None}


def other_settings(first: Path, second: Path) -> str:
    """Return the keys in which the runs' configurations differ, with both values; empty if there are none."""
    from nemo_prorl.config_changes import FORKED, changes
    from nemo_prorl.settings import read_config

    files = [folder / "config.yaml" for folder in (first, second)]
    if not all(file.is_file() for file in files):
        return ""
    return changes(read_config(files[0]), read_config(files[1]), (*FORKED, "chain."))


def values(first: Path, second: Path, parting: "Parting") -> list[str]:
    """Return the values of the first response that differs, if both runs have stored the step's batch."""
    from nemo_prorl.lifecycle.batches import read_batch
    from nemo_prorl.lifecycle.ledger import object_of

    words = parting.where.partition(",")[0].split()
    if words[:1] != ["response"] or object_of(parting.object).phase == "trainer":
        return []
    sample, draw = int(words[1]), int(words[4])
    lines = []
    for folder in (first, second):
        try:
            group = next(group for group in read_batch(folder, parting.step) if group.draw_index == draw)
        except (DataError, StopIteration):
            return []
        response, verdict = group.responses[sample], group.verdicts[sample]
        tokens, logps = response.token_ids[:_SHOWN_TOKENS], [round(x, 5) for x in response.logprobs[:_SHOWN_TOKENS]]
        lines.append(f"  {folder}: score {verdict['score']}, {len(response.token_ids)} tokens {tokens}, log p {logps}")
    return lines
