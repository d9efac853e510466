"""Runs the real actor on Megatron's Transformer Engine layers, computed by a stand-in, and writes its results.

    PYTHONPATH=.:tests/te_stand_in python tests/policy/te_ranks.py OUT

The configuration is `cluster=h100_4x8` with fewer nodes and a small model.  One process imports NeMo and forks ranks.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from nemo_prorl.algorithms.losses import denominator_terms
from nemo_prorl.batch import Batch
from nemo_prorl.config import GRPOConfig
from nemo_prorl.policy.tools import export_hf, import_hf
from nemo_prorl.policy.weights import HFFolder
from nemo_prorl.settings import load
from nemo_prorl.sizing.memory import PIECE, memory_of
from nemo_prorl.trainer import policy_loss
from tests.policy.fake_gpu import fake_gpu
from tests.policy.models import QWEN2, QWEN3, write_model
from tests.policy.ranks import fixed_batch, fork_ranks

MODELS = {"model": QWEN2 | {"num_hidden_layers": 3}, "qwen3": QWEN3}


@dataclass(frozen=True)
class Case:
    """A way to run the model."""

    name: str
    overrides: tuple[str, ...] = ()
    cluster: str = "h100_4x8"
    ranks: int = 1
    model: str = "model"  # folder of the model
    fused: bool = False  # linear layers add to the gradient's buffer in float32, too, where NeMo turns this off


FLOAT32 = ("trainer.precision=32", "model.megatron_amp_O2=false")
ACROSS = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true", "model.packed_sequences=true")
LOCAL = Case(  # Megatron's own layers
    "local", (*FLOAT32, "model.transformer_engine=false", "model.gradient_accumulation_fusion=false")
)
LOCAL_FUSED = Case("local-fused", LOCAL.overrides, fused=True)
QWEN3_LOCAL = Case("qwen3-local", LOCAL.overrides, model="qwen3")
QWEN3_ACROSS = Case("qwen3-across", (*FLOAT32, *ACROSS), ranks=2, model="qwen3")
BF16 = Case("bf16")
ACROSS_RANKS = Case("float32-across", (*FLOAT32, *ACROSS), ranks=2)
ACROSS_FUSED = Case("float32-across-fused", ACROSS_RANKS.overrides, ranks=2, fused=True)
TENSORWISE = Case("tensorwise-across", (*ACROSS, "model.first_last_layers_bf16=true"), "h100_4x8_fp8", ranks=2)
DELAYED = Case("delayed", ("model.fp8_recipe=delayed",), "h100_4x8_fp8")
CASES = [LOCAL, LOCAL_FUSED, QWEN3_LOCAL, QWEN3_ACROSS, BF16, ACROSS_RANKS, ACROSS_FUSED, TENSORWISE, DELAYED]
RESUMED = [TENSORWISE, DELAYED]


def config_of(case: Case, folder: HFFolder) -> Any:
    return load(
        [
            f"cluster={case.cluster}",
            f"pretrained_checkpoint.restore_from_path={folder.path}",
            "trainer.num_nodes=1",
            f"trainer.devices={case.ranks}",
            "trainer.accelerator=cpu",
            "trainer.grpo.context_tokens=64",
            "data.max_prompt_tokens=null",
            "trainer.grpo.prompts_per_step=4",
            "rollout.engines=1",
            "model.make_vocab_size_divisible_by=16",
            "model.micro_batch_tokens=128",
            "model.optim.lr=1e-3",
            *case.overrides,
        ]
    )


def built(case: Case, out: Path) -> Any:
    from nemo_prorl.policy.build import build_actor

    torch.set_num_threads(1)
    folder = HFFolder(out / case.model)
    actor = build_actor(config_of(case, folder), folder.path).actor
    for layer in actor.module.decoder.modules() if case.fused else ():
        for name in {"gradient_accumulation_fusion", "fuse_wgrad_accumulation"} & vars(layer).keys():
            setattr(layer, name, True)
    return actor


def weights_of(actor: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in actor.export_weights()}


def updates_of(actor: Any) -> Callable[[], Any]:
    """A step: log-probabilities without gradients, then an update, as in training."""
    batch = fixed_batch()
    denominator = float(denominator_terms(batch.mask_BT, "token"))
    config = GRPOConfig(kl_coef=0.1, entropy_coef=0.01)

    def loss(logp_BT: Any, entropy_BT: Any, micro: Batch, denominator: float) -> Any:
        return policy_loss(logp_BT, entropy_BT, micro, denominator, config)

    def step() -> Any:
        logp_BT, _ = actor.logprobs(batch)
        sums = actor.update(batch, loss, denominator, with_entropy=True)
        return float(logp_BT.double().sum()), sums, actor.weights_sha256()

    return step


def measure(case: Case, out: Path) -> None:
    """Log-probabilities, gradients, updates, and what a checkpoint goes on with; rank 0 writes OUT/NAME.pt."""
    from nemo_prorl.policy import checkpoint_files

    actor = built(case, out)
    step, batch = updates_of(actor), fixed_batch()
    found: dict[str, Any] = {"logp": actor.logprobs(batch)[0], "layers": str(actor.module.decoder.layers[0])}
    found["in_fp8"] = [any(getattr(part, "fp8", False) for part in x.modules()) for x in actor.module.decoder.layers]
    checkpoint_files.CheckpointFiles(actor).save(out / "checkpoints" / f"{case.name}-0", {"step": 0})
    found["steps"] = [step() for _ in range(2)]
    found["shapes"] = sorted(actor._shapes)
    parameters = actor.module.named_parameters()
    found["fused"] = [name for name, p in parameters if getattr(p, "grad_added_to_main_grad", False)]
    checkpoint_files.CheckpointFiles(actor).save(out / "checkpoints" / f"{case.name}-2", {"step": 2})
    found["weights"] = weights_of(actor)
    if case in (BF16, TENSORWISE):
        found["awake"] = as_on_a_gpu(actor, case, out)
    onward = [step(), step()]
    actor.set_reference()
    actor.reset_optimizer()
    checkpoint_files.CheckpointFiles(actor).save(out / "checkpoints" / f"{case.name}-reset", {"step": 4})
    found["onward"] = [onward, [step()]]
    if int(os.environ["RANK"]) == 0:
        torch.save(found, out / f"{case.name}.pt")


def as_on_a_gpu(actor: Any, case: Case, out: Path) -> dict[str, Any]:
    """Bytes of a GPU that checkpoints and a hard reset take, at the size of the cluster's model; and the reference."""
    from nemo_prorl.policy import checkpoint_files, whole_weights

    batch, reference = fixed_batch(), actor.reference_logprobs(fixed_batch())
    words = [f"model.tensor_model_parallel_size={case.ranks}", "pretrained_checkpoint.restore_from_path=null"]
    words += [f"run_dir={out / 'run'}"]  # not the default, which may hold a laptop's run with its vocabulary
    real = memory_of(load([f"cluster={case.cluster}", *words])).weights
    scale = real / sum(p.nbytes for p in actor.module.parameters())
    vars(whole_weights)["PIECE"], piece = max(1, int(PIECE / scale)), PIECE
    found: dict[str, Any] = {}
    host = list(actor.stored_reference.tensors.values())
    with fake_gpu(host) as live:
        places = [p.data_ptr() for p in actor.module.parameters()]
        with actor.reference_weights():
            found["in place"] = places == [p.data_ptr() for p in actor.module.parameters()]
        found["reference"] = scale * live.peak
        found["same"] = torch.equal(reference, actor.reference_logprobs(batch))
    for name, work in (
        ("saving", lambda: checkpoint_files.CheckpointFiles(actor).save(out / "checkpoints" / f"{case.name}-gpu", {})),
        ("hashing", actor.reference_sha256),
        ("resetting", lambda: (actor.set_reference(), actor.reset_optimizer(), actor.reference_sha256())),
        ("loading", lambda: checkpoint_files.CheckpointFiles(actor).load(out / "checkpoints" / f"{case.name}-2")),
    ):
        actor.stored_reference._sha256 = None
        with fake_gpu(list(actor.stored_reference.tensors.values())) as live:
            work()
        found[name] = scale * live.peak
    vars(whole_weights)["PIECE"] = piece
    return found


def resume(case: Case, out: Path) -> None:
    """The same steps by other processes, from the checkpoints; rank 0 writes OUT/NAME-resumed.pt."""
    from nemo_prorl.policy import checkpoint_files

    actor = built(case, out)
    step, again = updates_of(actor), []
    for name, steps in (("2", 2), ("reset", 1)):
        checkpoint_files.CheckpointFiles(actor).load(out / "checkpoints" / f"{case.name}-{name}")
        again.append([step() for _ in range(steps)])
    if int(os.environ["RANK"]) == 0:
        torch.save(again, out / f"{case.name}-resumed.pt")


def cross(case: Case, folders: list[Path], out: Path) -> None:
    """Load what others wrote, and make a step; writes OUT/NAME-from-FOLDER.pt for each."""
    from nemo_prorl.policy import checkpoint_files

    actor = built(case, out)
    for folder in folders:
        checkpoint_files.CheckpointFiles(actor).load(folder)
        found = {"weights": weights_of(actor), "step": updates_of(actor)()}
        torch.save(found, out / f"{case.name}-from-{folder.name}.pt")


def convert(out: Path) -> list[str]:
    """Import the model before anything was computed; returns NeMo's and Megatron's modules that were imported."""
    import_hf(out / "model", out / "imported")
    export_hf(out / "imported", out / "again")
    return [name for name in sys.modules if name.split(".")[0] in ("nemo", "megatron", "lightning")]


def main() -> None:
    out = Path(sys.argv[1])
    for name, config in MODELS.items():
        write_model(out / name, config, torch.bfloat16)
    (out / "imported-by.json").write_text(json.dumps(convert(out)))
    from nemo_prorl.policy.cpu import shims as cpu

    cpu.enable(transformer_engine=True)
    import nemo_prorl.policy.actor
    import nemo_prorl.policy.checkpoint_files  # noqa: F401  (imported before the forks)

    for cluster in {case.cluster for case in CASES}:
        config_of(Case("", cluster=cluster), HFFolder(out / "model"))  # Hydra composes once, before the forks
    gc.freeze()  # as in ranks.py

    def fork(name: str, ranks: int, work: Callable[[], None]) -> None:
        fork_ranks(ranks, work, out / name, 240)

    for case in CASES:
        fork(case.name, case.ranks, partial(measure, case, out))
    for case in RESUMED:
        fork(f"{case.name}-resumed", case.ranks, partial(resume, case, out))
    saved = out / "checkpoints"
    fork("bf16-from", 1, lambda: cross(BF16, [saved / "bf16-0", out / "imported"], out))
    fork("local-from", 1, lambda: cross(LOCAL, [out / "imported"], out))
    OmegaConf.save(config_of(TENSORWISE, HFFolder(out / "model")), out / "config.yaml")
    export_hf(saved / "tensorwise-across-2", out / "exported")


if __name__ == "__main__":
    main()
