"""`prorl evaluate`: what the command line means.  Light: `--help` and wrong use load nothing heavy."""

import argparse
import json
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from nemo_prorl.evaluation.catalogue import Benchmark
    from nemo_prorl.evaluation.formats import EvaluationManifest, EvaluationResults

_log = logging.getLogger(__name__)

_SHOWN = 10  # differences


def add_parser(commands: Any) -> None:
    """Adds `evaluate` to the main command line."""
    text = "benchmarks of a model: pass@1, pass@k, rewards; comparison of models"
    parser = commands.add_parser("evaluate", help=text, description=text)
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="Hugging Face folder, checkpoint, run directory, or http://HOST/v1")
    add("overrides", metavar="OVERRIDE", nargs="*", default=[], help="KEY=VALUE, as of prorl train: rollout.*, ...")
    add("--benchmarks", metavar="A,B", help="names or sets; --list shows them")
    add("--out", metavar="DIR", type=Path, help="where everything is written; again: goes on")
    add("--list", action="store_true", help="the benchmarks, and what file each needs")
    add("--data", metavar="DIR", type=Path, help="folder with the prompt records that are not shipped")
    add("--samples", metavar="N", type=int, help="responses to each prompt")
    add("--temperature", metavar="T", type=float)
    add("--top-p", metavar="P", type=float)
    add("--context", metavar="N", type=int, help="tokens of prompt and response together")
    add("--max-response", metavar="N", type=int, help="tokens of a response, at most")
    add("--limit", metavar="N", type=int, help="only the first N prompts of each benchmark")
    add("--seed", metavar="N", type=int, default=None, help="default 1")
    add("--engines", metavar="N", type=int, help="on this machine; default: the cluster's, a node")
    add("--checkpoint", metavar="WHICH", default="newest", help="of a run directory: newest, best, or a step")
    add("--model", metavar="NAME", dest="model_name", help="of an address: what the server calls the model")
    add("--opens-thought", action="store_true", help="of an address: its chat template ends the prompt in <think>")
    add("--token-env", metavar="VAR", default="OPENAI_API_KEY", help="environment variable with the address's token")
    add("--requests", metavar="N", type=int, default=32, help="to an address at a time")
    add("--manifest", metavar="FILE", type=Path, help="evaluate as it says, and tell whether the numbers are equal")
    add("--compare", metavar="DIR", type=Path, nargs="+", help="folders of evaluations, the base first")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    if args.list:
        from nemo_prorl.evaluation.catalogue import catalogue, table

        sys.stdout.write(table(catalogue().values()))
        return 0
    if args.out is None:
        raise ConfigError("--out DIR is missing: where the evaluation is written")
    if args.compare:
        return _compare(args)
    _sort_words(args)
    return _again(args) if args.manifest else _evaluate(args)


def _sort_words(args: argparse.Namespace) -> None:
    """MODEL and overrides, in any order among the options; raises ConfigError for two models."""
    words = [*([] if args.model is None else [args.model]), *args.overrides]
    named = [word for word in words if "=" not in word or "://" in word or Path(word).exists()]
    if len(named) > 1:
        raise ConfigError(f"{' '.join(named)}: one MODEL at a time; overrides are KEY=VALUE")
    args.model = named[0] if named else None
    args.overrides = [word for word in words if word not in named]


def _evaluate(args: argparse.Namespace) -> int:
    from nemo_prorl.evaluation.catalogue import choose

    if args.model is None:
        raise ConfigError("MODEL is missing: a Hugging Face folder, a checkpoint, a run directory, or http://HOST/v1")
    if args.benchmarks is None:
        raise ConfigError("--benchmarks A,B is missing; prorl evaluate --list shows them")
    given = {name: getattr(args, name) for name in ("samples", "temperature", "top_p", "context", "max_response")}
    given = {name: value for name, value in given.items() if value is not None}
    chosen = tuple(one.changed(given) for one in choose(args.benchmarks))
    found = _run(args, args.model, chosen, 1 if args.seed is None else args.seed, args.data, args.limit, None)
    return _tell(found, args.out)


def _run(
    args: argparse.Namespace,
    model: str,
    benchmarks: "tuple[Benchmark, ...]",
    seed: int,
    data: Path | None,
    limit: int | None,
    expected: "EvaluationManifest | None",
) -> "EvaluationResults":
    for name, value in (("limit", limit), ("engines", args.engines), ("requests", args.requests)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: must be at least 1")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed {seed}: must be in 0..2**63-1")
    from nemo_prorl.evaluation.run import EvaluationOptions, evaluate

    return evaluate(
        EvaluationOptions(
            model=model,
            benchmarks=benchmarks,
            out=args.out,
            seed=seed,
            data=data,
            limit=limit,
            engines=args.engines,
            checkpoint=args.checkpoint,
            model_name=args.model_name,
            opens_thought=args.opens_thought,
            token_env=args.token_env,
            at_a_time=args.requests,
            overrides=tuple(args.overrides),
            expected=expected,
        )
    )


def _tell(found: "EvaluationResults", out: Path) -> int:
    from nemo_prorl.evaluation.results import table

    sys.stdout.write(table(found))
    _log.info(
        "pass@1, reward and pass@k in percent, with standard errors over prompts; all numbers: %s/results.json", out
    )
    if found["complete"]:
        return 0
    lacking = sum(entry["unjudged"] for entry in found["benchmarks"].values())
    _log.error("prorl: %d responses have no verdict and count nowhere; the same command judges them again", lacking)
    return 1


def _again(args: argparse.Namespace) -> int:
    from nemo_prorl.evaluation.catalogue import Sampling, catalogue
    from nemo_prorl.evaluation.run import differences

    expected = _read(args.manifest)
    for name in ("benchmarks", "samples", "temperature", "top_p", "context", "max_response", "limit", "seed"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: with --manifest everything is as the manifest says")
    if args.out.resolve() == args.manifest.resolve().parent:
        raise ConfigError(f"--out {args.out} is the manifest's own folder; name another")
    known, keys = catalogue(), {one.name for one in fields(Sampling)}
    chosen = []
    for name, entry in expected["benchmarks"].items():
        if name not in known or set(entry["sampling"]) != keys:
            raise ConfigError(f"{args.manifest}: {name}: no benchmark of this version")
        chosen.append(known[name].changed(entry["sampling"]))
    told = expected["model"]
    args.model_name = args.model_name or (told["name"] if told["kind"] == "endpoint" else None)
    args.opens_thought = args.opens_thought or told.get("opens_thought", False)
    if told["kind"] == "run" and args.checkpoint == "newest" and args.model is None:
        args.checkpoint = str(told["step"])
    model = args.model or told.get("url") or told["folder"]
    data = args.data or (None if expected["data"] is None else Path(expected["data"]))
    found = _run(args, model, tuple(chosen), expected["seed"], data, expected["limit"], expected)
    code = _tell(found, args.out)
    there = args.manifest.parent / "results.json"
    if not there.is_file():
        _log.warning("%s is not there: nothing to compare with", there)
        return code
    unequal = differences(_read(there), found)
    if not unequal:
        sys.stdout.write(f"equal to {there}\n")
        return code
    sys.stdout.write(f"{len(unequal)} numbers differ from {there}:\n")
    sys.stdout.write("".join(f"  {text}\n" for text in unequal[:_SHOWN]))
    return 1


def _read(path: Path) -> Any:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != 1:
        raise DataError(f"{path}: field 'format' must be 1, as prorl evaluate writes it")
    return value


def _compare(args: argparse.Namespace) -> int:
    from nemo_prorl.evaluation import compare
    from nemo_prorl.evaluation.run import write_json

    found = compare.compare(compare.read(args.compare))
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "comparison.json", found)
    sys.stdout.write(compare.table(found))
    return 0
