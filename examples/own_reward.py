"""Train on a reward of your own: the share of a response's characters that are vowels.

    python examples/own_reward.py [OVERRIDE...]

The reward is the function `vowels` of this file.  It runs in a worker process of its own.
"""

import json
import sys
from pathlib import Path
from typing import Any

RUN = Path("runs/vowels")


def vowels(prompt: Any, response: str, truth: Any) -> float:
    """Return a score from 0 to 1; `truth` is the field `truth` of the record."""
    return sum(letter in truth["vowels"] for letter in response.lower()) / max(1, len(response))


def main(overrides: list[str]) -> None:
    import nemo_prorl

    records = [
        {"id": str(n), "task": "vowels", "prompt": f"Say word {n}.", "truth": {"vowels": "aeiou"}} for n in range(200)
    ]
    RUN.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", records[:168]), ("validation", records[168:])):
        (RUN / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    run = nemo_prorl.train(
        [
            {
                "run_dir": RUN,
                "rewards": {"functions": {"vowels": vowels}},
                "data": {part: [{"name": "vowels", "path": RUN / f"{part}.jsonl"}] for part in ("train", "validation")},
                "trainer.warmup.steps": 0,  # there is no right answer to imitate
                "trainer.grpo": {"max_steps": 20, "validate_every": 10},
            },
            *overrides,
        ]
    )
    heldout = run.summary["heldout"]
    print(
        f"share of vowels: {heldout['before']:.2f} before, {heldout['after']:.2f} after {run.metrics[-1]['step']} steps"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
