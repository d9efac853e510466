"""Lets the real actor at its real size build, step, save, reset and load on the meta device, and writes its live bytes.

    PYTHONPATH=.:tests/te_stand_in python tests/planning/rehearse_memory.py OUT CASE...

OUT/CASE/found.json gets the most bytes of the GPU at a time in each phase, and the bytes that stay.  Real are NeMo's
model, Megatron's layers, data parallelism and distributed optimizer over 32 ranks, of which only rank 0 runs, the
log-probabilities in chunks, and checkpoints but for the content of their files.  Stand-ins keep what Transformer
Engine's kernels keep for the backward pass, and take no memory beside that: a norm keeps its input, its output and
1 / rms; a linear layer its input; attention queries, keys, values, output and log-sum-exp.  A batch's tokens, masks and
targets are left out.
"""

import gc
import io
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.futures import Future

from nemo_prorl.batch import Batch, Rows
from nemo_prorl.config import GRPOConfig
from nemo_prorl.settings import load
from nemo_prorl.sizing.memory import micro_batch_tokens
from nemo_prorl.trainer import policy_loss
from tests.planning.memory_cases import CASES, Case
from tests.policy.meta_gpu import META, MetaGpu, enable
from tests.policy.models import write_hollow_model

# --- what Transformer Engine's kernels keep --------------------------------------------------------------------------


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=META))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def normalized(kind: str, x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    out: Tensor = _Norm.apply(x, weight)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor) -> Tensor:
        out = torch.empty(q_SBHD.shape, dtype=q_SBHD.dtype, device=META).flatten(2)
        lse = torch.empty(q_SBHD.shape[:-1], dtype=torch.float32, device=META)
        ctx.save_for_backward(q_SBHD, k_SBGD, v_SBGD, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(x.shape, dtype=x.dtype, device=META) for x in ctx.saved_tensors[:3])


def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    with self.prepare_forward(query, num_gemms=3):
        out: Tensor = _Attention.apply(query, key, value)
        return out


class _Linear(torch.autograd.Function):
    """Rows of all tensor ranks are there for one product only: they are gathered again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gathers: int, scatters: int, fused: bool
    ) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.bias, ctx.gathers, ctx.scatters, ctx.fused = weight, bias, gathers, scatters, fused
        out = _all(x, gathers) @ weight.t()
        if bias is not None:
            out += bias
        return _own(out, scatters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = _all(grad, ctx.scatters)
        grad_x = _own(grad @ weight, ctx.gathers)
        if ctx.fused:  # into main_grad; what is returned has the size of the gradient, and no content
            ctx.parameter.grad_added_to_main_grad = True
            grad_weight = torch.empty_like(weight)
        else:
            grad_weight = grad.flatten(0, -2).t() @ _all(x, ctx.gathers).flatten(0, -2)
        return grad_x, grad_weight, None if ctx.bias is None else torch.empty_like(ctx.bias), None, None, None


def _all(x: Tensor, ranks: int) -> Tensor:
    return x if ranks == 1 else torch.empty(ranks * len(x), *x.shape[1:], dtype=x.dtype, device=META)


def _own(x: Tensor, ranks: int) -> Tensor:
    return x if ranks == 1 else torch.empty(len(x) // ranks, *x.shape[1:], dtype=x.dtype, device=META)


def product(self: Any, x: Tensor, is_first_microbatch: bool | None, transpose_if_no_grad: bool) -> Any:
    cut = self.tp_size if self.sequence_parallel else 1
    gathers, scatters = (cut if self.parallel_mode == mode else 1 for mode in ("column", "row"))
    bias = self.bias if self.apply_bias else None
    out = _Linear.apply(x, self.weight, bias, gathers, scatters, self.fuse_wgrad_accumulation)
    return (out, self.bias) if self.return_bias else out


def take_no_memory_in_kernels() -> None:
    import megatron.core.optimizer.clip_grads as clip_grads
    from transformer_engine.pytorch.attention import DotProductAttention
    from transformer_engine.pytorch.module import _norm, layernorm_linear
    from transformer_engine.pytorch.module.linear import LinearParts
    from transformer_engine.pytorch.optimizers import FusedAdam

    vars(layernorm_linear)["normalized"] = vars(_norm)["normalized"] = normalized
    for owner, name, kernel in (
        (LinearParts, "_product", product),
        (DotProductAttention, "forward", attend),
        (FusedAdam, "_update", lambda *_: None),
    ):
        setattr(owner, name, kernel)
    vars(clip_grads)["multi_tensor_scale_impl"] = lambda *_: None


# --- checkpoints without content -------------------------------------------------------------------------------------


def write_and_read_no_content(gpu: MetaGpu) -> None:
    """Checkpoints get all their files, and tensors of no bytes; each rank's part counts as the whole."""
    import torch.distributed.checkpoint.default_planner as planner
    import torch.distributed.checkpoint.filesystem as files
    from megatron.core.dist_checkpointing import state_dict_utils, validation
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    import nemo_prorl.policy.weights as weights

    written = vars(files)["WriteResult"]

    def write(_: Any, stream: Any, __: Any, item: Any, key: str, *___: Any) -> Any:
        return written(item.index, 0, files._StorageInfo(key, stream.tell(), 0))

    def read(self: Any, plan: Any, planner: Any) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(torch.empty(target.size(), dtype=target.dtype))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    vars(files)["_write_item"], files.FileSystemReader.read_data = write, read  # type: ignore[method-assign]
    vars(planner)["_validate_global_plan"], vars(planner)["_init_state_dict"] = lambda *_: [], lambda _: None
    init_data = ShardedTensor.init_data

    def init_elsewhere(self: Any, *args: Any, **more: Any) -> None:
        with gpu.elsewhere():  # on the CPU, or on the meta device to compare shapes
            init_data(self, *args, **more)

    ShardedTensor.init_data = init_elsewhere
    for module in (state_dict_utils, validation):
        vars(module)["validate_sharding_integrity"] = lambda *_, **__: None

    def digest(data: bytes = b"") -> Any:
        return SimpleNamespace(update=lambda _: None, digest=lambda: b"", hexdigest=lambda: "")

    vars(weights)["hashlib"] = SimpleNamespace(sha256=digest)


class Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(memoryview(data).cast("B"))

    def seek(self, *_: int) -> int:
        return 0


# --- the phases ------------------------------------------------------------------------------------------------------


def batch_of(cfg: DictConfig) -> Batch:
    """Two micro-batches as large as they may be, of prompts of 8 tokens and responses that fill the context."""
    context = cfg.trainer.grpo.context_tokens
    rows = 2 * micro_batch_tokens(cfg) // context
    response = context - 8
    return Rows(
        np.full(rows * context, 7, np.int32),
        np.full(rows * response, -1.0, np.float32),
        np.full(rows, 8),
        np.full(rows, response),
        np.full(rows, True),
    ).batch(context)


def loss(logp_BT: Tensor, entropy_BT: Tensor | None, micro: Batch, denominator: float) -> tuple[Tensor, dict]:
    value, sums = policy_loss(logp_BT, entropy_BT, micro, denominator, GRPOConfig(kl_coef=0.1))
    return value, {name: number for name, number in sums.items() if name != "nonfinite"}


def rehearse(cfg: DictConfig, folder: Path, out: Path, gpu: MetaGpu) -> dict[str, Any]:
    from nemo_prorl.policy.build import build_actor
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles
    from nemo_prorl.rollout.weight_store import WeightStore

    peaks: dict[str, int] = {}

    def phase(name: str, work: Callable[[], Any]) -> Any:
        gc.collect()
        gpu.peak = gpu.now
        result = work()
        peaks[name] = gpu.peak
        return result

    actor = phase("building", lambda: build_actor(cfg, folder).actor)
    gc.collect()
    kept, batch = gpu.now, batch_of(cfg)
    published = WeightStore(out / "published", "bfloat16")
    store = CheckpointFiles(actor)
    again = actor.stored_reference
    phase("log-probabilities", lambda: actor.logprobs(batch))
    phase("reference's", lambda: actor.reference_logprobs(batch))
    phase("update", lambda: actor.update(batch, loss, 1.0))
    phase("publishing", lambda: published._stream(Nowhere(), actor.export_weights(), 1))  # type: ignore[arg-type]
    phase("saving", lambda: store.save(out / "checkpoint", {"step": 1}))
    again._sha256 = None
    phase("hashing", actor.reference_sha256)
    phase("resetting", lambda: (actor.set_reference(), actor.reset_optimizer(), actor.reference_sha256()))
    phase("loading", lambda: store.load(out / "checkpoint"))
    gc.collect()
    return {"kept": kept, "left": gpu.now, "peaks": peaks, "linear": linear_weights(actor)}


def linear_weights(actor: Any) -> int:
    """Number of the weights that FP8 would copy."""
    return sum(layer.weight.numel() for layer in actor.module.decoder.modules() if hasattr(layer, "parallel_mode"))


def run(case: Case, out: Path) -> None:
    gpu, folder = MetaGpu(), write_hollow_model(out / "model", case.model)
    cfg = load([*case.words, f"pretrained_checkpoint.restore_from_path={folder}", "trainer.accelerator=cpu"])
    enable(gpu, cfg.trainer.num_nodes * cfg.trainer.devices)
    take_no_memory_in_kernels()
    write_and_read_no_content(gpu)
    setattr(Batch, "to", lambda self, _: self)  # noqa: B010  (its tokens and masks are read)
    with gpu:
        found = rehearse(cfg, folder, out, gpu)
    (out / "found.json").write_text(json.dumps(found))


def main(out: Path, names: list[str]) -> None:
    """One process imports NeMo, and forks one for each case."""
    from nemo_prorl.policy.cpu import shims

    shims.enable(transformer_engine=True)
    import nemo_prorl.policy.actor
    import nemo_prorl.policy.checkpoint_files  # noqa: F401  (imported before the forks)

    for name in names:
        process = multiprocessing.get_context("fork").Process(target=run, args=(CASES[name], out / name))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name}: exit status {process.exitcode}")


if __name__ == "__main__":
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="32", LOCAL_WORLD_SIZE="8", GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # nothing listens there
    main(Path(sys.argv[1]), sys.argv[2:])
    os._exit(0)
