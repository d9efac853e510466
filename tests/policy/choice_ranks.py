"""Builds the real actor with each choice of the keys that NeMo dispatches on, and makes an update with it.

    PYTHONPATH=.:tests/te_stand_in python tests/policy/choice_ranks.py OUT

It writes OUT/NUMBER.json for each of `CHOICES`.  One process imports NeMo and forks a rank for each.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_prorl.config import all_keys
from tests.policy.models import write_model
from tests.policy.ranks import fork_ranks
from tests.policy.te_ranks import MODELS, Case, built, updates_of

CHOICES: list[tuple[str, Any]] = [
    (key.name, choice)
    for key in all_keys()
    if key.name == "trainer.precision" or (key.name.startswith("model.") and key.name != "model.optim.sched.name")
    for choice in key.rule.choices
]
ALIKE = {"32": 32, "32-true": 32, "bf16-mixed": "bf16"}  # trainer.precision: Lightning's older and newer names


def settings_of(key: str, value: Any) -> list[str]:
    """The overrides that set the choice, with what its check asks for."""
    text = "null" if value is None else f"'{value}'" if isinstance(value, str) else str(value)
    half = "true" if str(value).startswith("bf16") else "false"
    return [f"{key}={text}", *([f"model.megatron_amp_O2={half}"] if key == "trainer.precision" else [])]


def measure(case: Case, out: Path) -> None:
    actor = built(case, out)
    kinds = {type(part).__name__ for part in actor.module.modules()}
    found: dict[str, Any] = {"modules": sorted(kinds), "optimizer": type(actor.optimizer).__name__}
    found["weights"] = sorted({str(value.dtype) for value in actor.module.parameters()})
    logp, sums, sha256 = updates_of(actor)()
    (out / f"{case.name}.json").write_text(json.dumps({**found, "logp": logp, "loss": sums["loss"], "sha256": sha256}))


def main() -> None:
    out = Path(sys.argv[1])
    write_model(out / "model", MODELS["model"], torch.bfloat16)
    from nemo_prorl.policy.cpu import shims as cpu

    cpu.enable(transformer_engine=True)

    import nemo_prorl.policy.actor  # noqa: F401  (imported before the forks)

    for number, (key, choice) in enumerate(CHOICES):
        cluster = "h100_4x8_fp8" if key.startswith("model.fp8") else "h100_4x8"
        case = Case(str(number), tuple(settings_of(key, choice)), cluster)
        fork_ranks(1, partial(measure, case, out), out / case.name, 240)


if __name__ == "__main__":
    main()
