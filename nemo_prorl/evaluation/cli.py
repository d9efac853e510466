"""Command line of `prorl evaluate`.  It imports heavy libraries late, so that `--help` and wrong use are fast."""

import argparse
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.evaluation.models import is_url
from nemo_prorl.evaluation.store import Store, read_json

if TYPE_CHECKING:
    from nemo_prorl.evaluation.catalogue import Benchmark
    from nemo_prorl.evaluation.formats import EvaluationManifest, EvaluationResults

_log = logging.getLogger(__name__)

PAPER = "paper"  # in place of a folder in --compare; a folder of this name is ./paper
_SHOWN = 10  # differences printed at most
_SAMPLING = ("samples", "temperature", "top_p", "context", "max_response")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number in 0..2**63-1")
    return int(text)


def add_parser(commands: Any) -> None:
    """Add `evaluate` to the main command line."""
    text = "evaluate a model on benchmarks (pass@1, pass@k, rewards), or compare evaluated models"
    parser = commands.add_parser("evaluate", help=text, description=text)
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        nargs="?",
        help="Hugging Face folder or hub name, checkpoint, run directory, or URL of a server (http://HOST/v1)",
    )
    add("overrides", metavar="OVERRIDE", nargs="*", default=[], help="KEY=VALUE, such as rollout.dtype=bfloat16")
    add("--benchmarks", metavar="A,B", help="names of benchmarks or sets (--list), or own .yaml or .jsonl files")
    add(
        "--out",
        metavar="DIR",
        type=Path,
        help="folder of the evaluation; the same command again completes it. With --compare: optional",
    )
    add("--list", action="store_true", help="list the benchmarks and the file that each needs")
    add("--data", metavar="DIR", type=Path, help="folder with the prompt records of benchmarks that are not shipped")
    add("--samples", metavar="N", type=int, help="responses per prompt (default: the benchmark's)")
    add("--temperature", metavar="T", type=float, help="sampling temperature; 0: greedy (default: the benchmark's)")
    add("--top-p", metavar="P", type=float, help="nucleus sampling, above 0 up to 1 (default: the benchmark's)")
    add("--context", metavar="N", type=int, help="tokens of prompt and response together (default: the benchmark's)")
    add("--max-response", metavar="N", type=int, help="maximum tokens per response (default: the benchmark's)")
    add("--limit", metavar="N", type=_positive, help="first N prompts of each benchmark (default: all)")
    add("--seed", metavar="N", type=_seed, help="seed of the sampling (default: 1)")
    engines = "engines on this machine (default: rollout.engines / trainer.num_nodes)"
    add("--engines", metavar="N", type=_positive, help=engines)
    which = "checkpoint of a run directory: newest, best or a step number (default: newest)"
    add("--checkpoint", metavar="WHICH", default="newest", help=which)
    add("--model", metavar="NAME", dest="model_name", help="name of the model on its server, if MODEL is a URL")
    thought = (
        "if MODEL is a URL: its chat template ends the prompt in <think>; responses are judged as if they began with it"
    )
    add("--opens-thought", action="store_true", help=thought)
    token = "environment variable with the server's token (default: OPENAI_API_KEY)"
    add("--token-env", metavar="VAR", default="OPENAI_API_KEY", help=token)
    add(
        "--requests", metavar="N", type=_positive, default=32, help="maximum concurrent requests to a URL (default: 32)"
    )
    add("--manifest", metavar="FILE", type=Path, help="manifest.json of an evaluation to repeat and compare with")
    again = "judge the stored responses in --out again, with a corrected reward, without sampling; takes only overrides"
    add("--judge-again", action="store_true", help=again)
    compare = "folders of evaluations to compare, the base first; `paper` first: compare each with published scores"
    add("--compare", metavar="DIR", nargs="+", help=compare)
    column = (
        "with --compare paper: the published model to compare with, such as base or end; with commas for several DIR"
    )
    add("--as", metavar="NAME", dest="columns", help=column)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    if args.list:
        from nemo_prorl.evaluation.catalogue import catalogue, table
        from nemo_prorl.planning.columns import columns

        sys.stdout.write(columns(table(catalogue().values())))
        return 0
    if args.compare:  # overrides after its folders
        args.overrides += [word for word in args.compare if "=" in word]
        args.compare = [word for word in args.compare if "=" not in word]
    _separate_model(args)
    if args.out is None and (args.model is not None or not args.compare):
        raise ConfigError("--out DIR is missing: the folder that the evaluation is written to")
    if args.columns is not None and args.compare is None:
        raise ConfigError(f"--as={args.columns}: expected --compare paper, too")
    if args.compare and (args.model is None or args.compare != [PAPER]):
        return _compare(args)
    if args.judge_again:
        return _judge_again(args)
    return _again(args) if args.manifest else _evaluate(args)


def _separate_model(args: argparse.Namespace) -> None:
    """Separate MODEL from overrides, in whatever order they were given.  Raises ConfigError for two models."""
    words = [*([] if args.model is None else [args.model]), *args.overrides]
    named = [word for word in words if "=" not in word or is_url(word) or Path(word).exists()]
    if len(named) > 1:
        raise ConfigError(f"{' '.join(named)}: expected one MODEL; overrides are KEY=VALUE")
    args.model = named[0] if named else None
    args.overrides = [word for word in words if word not in named]


def _evaluate(args: argparse.Namespace) -> int:
    from nemo_prorl.evaluation.catalogue import choose

    if args.model is None:
        raise ConfigError(
            "MODEL is missing: give a Hugging Face folder, a checkpoint, a run directory, or http://HOST/v1"
        )
    if args.benchmarks is None:
        raise ConfigError("--benchmarks A,B is missing; prorl evaluate --list shows the names")
    sampling = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    chosen = [benchmark.changed(sampling) for benchmark in choose(args.benchmarks)]
    if not args.compare:
        return _run(args, chosen)[1]
    from nemo_prorl.evaluation.published import column_of

    is_run = any((Path(args.model) / name).exists() for name in ("checkpoints", "state.json"))
    args.columns = column_of(args.model_name or args.model, is_run, args.columns)  # an error comes before the work
    code = _run(args, chosen)[1]
    return _compare_with_paper(args.out, [args.out], [args.columns]) or code


def _run(
    args: argparse.Namespace, benchmarks: "list[Benchmark]", expected: "EvaluationManifest | None" = None
) -> "tuple[EvaluationResults, int]":
    """Evaluate, print the table, and return the content of results.json and the exit code."""
    from nemo_prorl.evaluation.run import EvaluationOptions, evaluate

    options = {item.name: getattr(args, item.name) for item in fields(EvaluationOptions) if hasattr(args, item.name)}
    options |= {
        "benchmarks": benchmarks,
        "overrides": tuple(args.overrides),
        "seed": 1 if args.seed is None else args.seed,
    }
    result = evaluate(EvaluationOptions(**options, expected=expected))
    _print(result, args.out)
    if result["complete"]:
        return result, 0
    lacking = sum(entry["unjudged"] for entry in result["benchmarks"].values())
    stored = [line for name in result["benchmarks"] for line in Store(args.out, name, writable=False).verdicts.values()]
    reason = next((f"; the first: {line['detail']}" for line in stored if line["score"] is None), "")
    fix = "run the same command again"
    if " raised " in reason:
        fix = f"correct it, and `prorl evaluate --judge-again --out {args.out}`"
    _log.error("prorl: %d responses have no verdict and are left out%s. Fix: %s", lacking, reason, fix)
    return result, 1


def _print(result: "EvaluationResults", out: Path) -> None:
    from nemo_prorl.evaluation.results import table

    sys.stdout.write(table(result))
    _log.info(
        "pass@1, reward and pass@k in percent, with standard errors over prompts; all numbers: %s/results.json", out
    )


def _judge_again(args: argparse.Namespace) -> int:
    for name in ("model", "benchmarks", "manifest", "data", *_SAMPLING, "limit", "seed"):
        if getattr(args, name) is not None:
            word = args.model if name == "model" else f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{word}: cannot be combined with --judge-again, which takes this from the manifest.json in --out."
                f" Fix: prorl evaluate --judge-again --out {args.out}, and overrides"
            )
    from nemo_prorl.evaluation.judge_again import judge_again

    result, changes = judge_again(args.out, args.overrides)
    sys.stdout.write("\n".join(changes.lines()) + "\n")
    _print(result, args.out)
    for name, entry in result["benchmarks"].items():
        sys.stdout.write(f"{name}: judged by {entry['scorer']} at {result['time']['judged']}\n")
    if not result["complete"]:
        _log.warning(
            "responses are missing; the command of the evaluation samples them and judges them with this scorer"
        )
    return 0


def _again(args: argparse.Namespace) -> int:
    from nemo_prorl.evaluation.catalogue import Sampling, catalogue
    from nemo_prorl.evaluation.run import differences

    expected: EvaluationManifest = read_json(args.manifest)
    for name in ("benchmarks", *_SAMPLING, "limit", "seed"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: cannot be combined with --manifest, which sets it")
    if args.out.resolve() == args.manifest.resolve().parent:
        raise ConfigError(f"--out {args.out}: is the folder of the manifest itself; give another folder")
    own = [entry["file"] for entry in expected["benchmarks"].values() if "file" in entry]
    known, keys = catalogue(own), {field.name for field in fields(Sampling)}
    chosen = []
    for name, entry in expected["benchmarks"].items():
        if name not in known or set(entry["sampling"]) != keys:
            raise ConfigError(
                f"{args.manifest}: this version of nemo_prorl does not have the benchmark {name}, or has other keys in"
                " its sampling settings. Fix: use the version that wrote the manifest"
            )
        chosen.append(known[name].changed(entry["sampling"]))
    model = expected["model"]
    if model["kind"] == "run" and args.checkpoint == "newest" and args.model is None:
        args.checkpoint = str(model["step"])
    if model["kind"] == "endpoint":
        args.model_name = args.model_name or model["name"]
        args.opens_thought = args.opens_thought or model.get("opens_thought", False)
    args.model = args.model or model.get("url") or model["folder"]
    args.data = args.data or (None if expected["data"] is None else Path(expected["data"]))
    args.seed, args.limit = expected["seed"], expected["limit"]
    result, code = _run(args, chosen, expected)
    earlier = args.manifest.parent / "results.json"
    if not earlier.is_file():
        _log.warning("%s does not exist: the numbers are not compared with the earlier evaluation", earlier)
        return code
    unequal = differences(read_json(earlier), result)
    if not unequal:
        sys.stdout.write(f"equal to {earlier}\n")
        return code
    sys.stdout.write(f"{len(unequal)} numbers differ from {earlier}:\n")
    sys.stdout.write("".join(f"  {text}\n" for text in unequal[:_SHOWN]))
    return 1


def _compare(args: argparse.Namespace) -> int:
    if args.model is not None:
        raise ConfigError(f"{args.model}: expected no MODEL with --compare {' '.join(args.compare)}")
    if args.compare[0] == PAPER:
        folders = [Path(folder) for folder in args.compare[1:]] or ([args.out] if args.out else [])
        if not folders:
            raise ConfigError("--compare paper: expected folders of evaluations. Fix: --compare paper DIR")
        columns = [None] * len(folders) if args.columns is None else args.columns.split(",")
        if len(columns) != len(folders):
            raise ConfigError(f"--as={args.columns}: expected {len(folders)} names, as many as folders")
        return _compare_with_paper(args.out, folders, columns)
    if args.columns is not None:
        raise ConfigError(f"--as={args.columns}: expected --compare paper DIR")
    from nemo_prorl.evaluation import compare

    comparison = compare.compare(compare.read([Path(folder) for folder in args.compare]))
    return _show(comparison, compare.table(comparison), args.out, "comparison.json")


def _compare_with_paper(out: Path | None, folders: list[Path], columns: list[str | None]) -> int:
    from nemo_prorl.evaluation import compare, published

    comparison = published.compare(compare.read(folders, least=1), columns)
    return _show(comparison, published.table(comparison), out, "published.json")


def _show(comparison: Any, text: str, out: Path | None, name: str) -> int:
    """Print the table of a comparison, and write the comparison to the file `name` in the folder `out`."""
    from nemo_prorl.files import write_json

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / name, comparison)
    sys.stdout.write(text)
    return 0
