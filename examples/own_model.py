"""Train a model of your own, and compare it with itself before.

    python examples/own_model.py MODEL [OVERRIDE...]

MODEL is a Hugging Face folder, or a name on the hub such as Qwen/Qwen2.5-0.5B-Instruct.  The laptop's arithmetic
problems are its data here; take yours with data.train.
"""

import subprocess
import sys

BENCHMARK = "laptop_gcd"  # shipped, generated problems; prorl evaluate --list names the others


def main(model: str, overrides: list[str]) -> None:
    import nemo_prorl

    run = nemo_prorl.train(
        [
            {
                "run_dir": "runs/own",
                "pretrained_checkpoint.restore_from_path": model,
                "trainer.grpo.max_steps": 10,
            },
            *overrides,
        ]
    )
    for name, which in (("before", model), ("after", str(run.path))):
        found = nemo_prorl.evaluate(which, BENCHMARK, f"runs/own-{name}", limit=16, samples=2)
        print(f"{name}: mean reward {found['benchmarks'][BENCHMARK]['reward']['mean']:.3f}")
    subprocess.run([sys.executable, "-m", "nemo_prorl.cli", "export-hf", str(run.path), "runs/own-model"], check=True)
    print("runs/own-model is a Hugging Face folder: transformers and vLLM load it")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
