"""Runs the real actor at several parallel layouts and writes down what each computes.

    python tests/policy/ranks.py OUT

NeMo takes 15 s to import: one process does it and forks the ranks of each layout in turn.
"""

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_prorl.algorithms.losses import LossConfig, denominator_terms
from nemo_prorl.batch import Batch
from nemo_prorl.policy.tools import export_hf, import_hf
from nemo_prorl.policy.weights import HFFolder, model_keys_from_hf, write_hf_folder
from nemo_prorl.settings import load
from nemo_prorl.trainer import policy_loss
from tests.policy.models import MODELS, write_model

STEPS = 3


@dataclass(frozen=True)
class Layout:
    """One way to run one model."""

    model: str = "qwen2"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    micro_batch: int = 4

    @property
    def name(self) -> str:
        return f"{self.model}-tp{self.tp}-pp{self.pp}-dp{self.dp}-sp{int(self.sp)}-mb{self.micro_batch}"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


LAYOUTS = [
    Layout(),
    Layout(micro_batch=3),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, sp=True),
    Layout("llama_tied"),
    Layout("llama_tied", tp=2, pp=2),
]


def fixed_batch() -> Batch:
    """18 responses of many lengths, one of them empty, with targets that exercise every term of the loss."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 99, (count,), generator=generator).tolist()

    prompts = [tokens(3 + i % 5) for i in range(18)]
    responses = [tokens((7 * i) % 12) for i in range(18)]
    logps = [(-4.0 - torch.rand(len(r), generator=generator)).tolist() for r in responses]
    batch = Batch.from_sequences(prompts, responses, logps)
    noise_BT = 0.3 * torch.randn(batch.mask_BT.shape, generator=generator)
    return batch.with_targets(
        advantage_B=torch.randn(18, generator=generator),
        old_logp_BT=torch.where(batch.mask_BT, batch.engine_logp_BT + noise_BT, 0.0),
        ref_logp_BT=torch.where(batch.mask_BT, batch.engine_logp_BT - noise_BT, 0.0),
        weight_BT=torch.where(batch.mask_BT, 1.0 + 0.5 * noise_BT.abs(), 0.0),
    )


def config_of(layout: Layout, hf: dict[str, Any]) -> Any:
    """The shipped laptop configuration with the layout and the model's shape."""
    return load(
        [
            f"trainer.devices={layout.world}",
            f"model.tensor_model_parallel_size={layout.tp}",
            f"model.pipeline_model_parallel_size={layout.pp}",
            f"model.sequence_parallel={str(layout.sp).lower()}",
            f"model.micro_batch_size={layout.micro_batch}",
            "model.make_vocab_size_divisible_by=8",
            "model.optim.lr=1e-3",
            "trainer.grpo.logprob_chunk_tokens=16",
            *[f"model.{key}={str(value).lower()}" for key, value in model_keys_from_hf(hf).items()],
        ]
    )


def measure(layout: Layout, out: Path) -> None:
    """What one rank does; rank 0 writes OUT/NAME.pt."""
    from nemo_prorl.policy import checkpoint
    from nemo_prorl.policy.build import build_actor

    torch.set_num_threads(1)
    folder = HFFolder(out / layout.model)
    actor = build_actor(config_of(layout, folder.config), folder.path).actor
    everything = fixed_batch()
    mine = everything.rows(torch.arange(actor.data_rank, len(everything), actor.data_size))
    share = denominator_terms(mine.mask_BT, "token")
    denominator = actor.sum_over_data_ranks(float(share))
    config = LossConfig(kl_coef=0.1, entropy_coef=0.01)

    def loss(logp_BT: Any, entropy_BT: Any, micro: Batch, denominator: float) -> Any:
        return policy_loss(logp_BT, entropy_BT, micro, denominator, config)

    found: dict[str, Any] = {"exported": {k: v.clone() for k, v in actor.export_weights()}}
    found["logp"], found["entropy"] = actor.logprobs(everything)
    found["reference_logp"] = actor.reference_logprobs(everything)
    found["sums"] = actor.gradients(mine, loss, denominator, 1.2, with_entropy=True)
    found["gradients"] = dict(actor.export_gradients())
    found["updates"] = [actor.update(mine, loss, denominator, with_entropy=True) for _ in range(STEPS)]
    found["weights"] = {k: v.clone() for k, v in actor.export_weights()}
    found["reference_after"] = actor.reference_sha256()

    # A checkpoint goes on to the bit; so does one of a hard reset.
    saved, step = out / "checkpoints" / layout.name, {"step": STEPS}
    checkpoint.save(actor, saved, step)
    sha = actor.weights_sha256()
    onward = [actor.update(mine, loss, denominator, with_entropy=True), actor.weights_sha256()]
    state = checkpoint.load(actor, saved)
    again = [actor.update(mine, loss, denominator, with_entropy=True), actor.weights_sha256()]
    found["resumed"] = (state["step"], state["weights_sha256"] == sha, onward, again)
    actor.set_reference()
    actor.reset_optimizer()
    checkpoint.save(actor, saved.with_name(layout.name + "-reset"), step)
    onward = [actor.update(mine, loss, denominator, with_entropy=True), actor.weights_sha256()]
    checkpoint.load(actor, saved.with_name(layout.name + "-reset"))
    again = [actor.update(mine, loss, denominator, with_entropy=True), actor.weights_sha256()]
    found["reset"] = (onward, again, actor.reference_sha256())

    poison = mine.with_targets(old_logp_BT=torch.where(mine.mask_BT, float("nan"), 0.0))
    before = actor.weights_sha256()
    try:
        actor.update(poison, loss, denominator, with_entropy=True)
        found["poison"] = "was made"
    except ArithmeticError as error:
        found["poison"] = f"{type(error).__name__}; weights kept: {actor.weights_sha256() == before}"

    if layout.name == LAYOUTS[0].name:
        checkpoint.load(actor, saved)
    elif layout.model == LAYOUTS[0].model:  # another layout's checkpoint: the same policy, from other files
        checkpoint.load(actor, out / "checkpoints" / LAYOUTS[0].name)
        found["resharded"] = {k: v.clone() for k, v in actor.export_weights()}
        found["resharded_update"] = actor.update(mine, loss, denominator, with_entropy=True)
    if layout.world == 1:
        write_hf_folder(out / f"{layout.name}-hf", actor.export_weights(), folder.path, None)
    if int(os.environ["RANK"]) == 0:
        torch.save(found, out / f"{layout.name}.pt")


def fork_ranks(world: int, work: Callable[[], None], log: Path, seconds: float) -> None:
    """Runs `work` in `world` forked ranks; raises with their output if one fails or the time is over."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            with log.with_suffix(f".{rank}.log").open("w") as f:
                os.dup2(f.fileno(), 1)
                os.dup2(f.fileno(), 2)
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "test",
            }
            code = 1
            try:
                work()
                code = 0
            except BaseException:  # a forked child must never return into the parent's code
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(pid)
    wait_for(children, log, seconds)


def wait_for(children: list[int], log: Path, seconds: float) -> None:
    """Waits for all children; kills the rest once one failed or the time is over."""
    end, waiting, failed = time.monotonic() + seconds, list(children), False
    while waiting and not failed and time.monotonic() < end:
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                waiting.remove(pid)
                failed |= status != 0
        time.sleep(0.02)
    for pid in waiting:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    if failed or waiting:
        told = "\n".join(p.read_text()[-3000:] for p in sorted(log.parent.glob(log.stem + ".*.log")))
        raise RuntimeError(f"{log.stem}: {'failed' if failed else 'out of time'}\n{told}")


def main() -> None:
    out = Path(sys.argv[1])
    for name, config in MODELS.items():
        write_model(out / name, config)
    from nemo_prorl.policy import cpu

    cpu.enable()
    import nemo_prorl.policy.actor
    import nemo_prorl.policy.checkpoint  # noqa: F401  (imported before the forks)

    for layout in LAYOUTS:
        fork_ranks(layout.world, lambda layout=layout: measure(layout, out), out / layout.name, 240)  # type: ignore[misc]

    write_model(out / "half", MODELS["qwen2"], torch.bfloat16)
    fork_ranks(1, lambda: import_hf(out / "half", out / "imported"), out / "import-hf", 120)
    fork_ranks(1, lambda: export_hf(out / "imported", out / "half-again"), out / "export-hf", 120)


if __name__ == "__main__":
    main()
