"""Train on problems of your own: a CSV file with the columns `problem` and `answer`, or a data set of the hub.

    python examples/own_data.py problems.csv [OVERRIDE...]
    python examples/own_data.py openai/gsm8k:main:train [OVERRIDE...]

A data set is named NAME:CONFIGURATION:SPLIT, is loaded with the package `datasets` (pip install datasets), and needs a
network or a filled cache.  `prorl data prepare` checks each problem, removes duplicates, and holds some out.
"""

import csv
import subprocess
import sys
from pathlib import Path

OUT = Path("prepared/mine")


def from_hub(name: str) -> Path:
    """Write a data set of the hub as a CSV file, and return its path."""
    from datasets import load_dataset

    repository, configuration, split = name.split(":")
    file = OUT.with_name(f"{repository.split('/')[-1]}.csv")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["problem", "answer"])
        for row in load_dataset(repository, configuration, split=split):
            writer.writerow([row["question"], row["answer"].split("####")[-1].strip()])  # the columns of GSM8K
    return file


def main(source: str, overrides: list[str]) -> None:
    import nemo_prorl

    file = Path(source) if source.endswith(".csv") else from_hub(source)
    prorl = [sys.executable, "-m", "nemo_prorl.cli"]
    prepare = ["data", "prepare", "math", f"--from={file}", f"--out={OUT}", "--name=mine", "--holdout=10"]
    subprocess.run([*prorl, *prepare], check=True)
    run = nemo_prorl.train(
        [
            {
                "run_dir": "runs/mine",
                "data.train": [{"name": "mine", "path": OUT / "train.jsonl"}],
                "data.validation": [{"name": "mine", "path": OUT / "validation.jsonl"}],
                "trainer.grpo.context_tokens": 160,
            },
            *overrides,
        ]
    )
    print(f"finished: {run.finished}; reward of the last step: {run.metrics[-1]['reward/all']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
