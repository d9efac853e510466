"""`prorl audit`: computes a stored step again in other ways, and says whether engine, trainer or rewards are off.

- The trainer trains the step again (`prorl replay-training`): all digests must be equal.
- transformers computes the log-probabilities of the recorded tokens in float64, with the weights before the step.  The
  engine's recorded ones, and the trainer's of the replay, must be near them.
- The plugins judge the responses again.
"""

import argparse
import logging
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_prorl.errors import ConfigError
from nemo_prorl.launcher.replayed import train_again
from nemo_prorl.planning.columns import columns

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_prorl.rollout.groups import Group

_log = logging.getLogger(__name__)

ALLOWED = {"float32": 0.001, "bfloat16": 0.1, "float16": 0.1}  # mean difference per token from float64, in nats

_AT_ONCE = 256  # positions: logits in float64 of a large vocabulary have a megabyte each


def add_parser(commands: Any) -> None:
    """Add `audit` to the main command line."""
    text = "compute a stored step again in float64, judge its responses again, and say whether engine, trainer or"
    parser = commands.add_parser("audit", help=f"{text} rewards are off", description=f"{text} rewards are off")
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--step", metavar="K", type=int, required=True, help="a step with a stored batch")
    help_text = "compute those in float64 in which engine and trainer differ most (default: 16)"
    parser.add_argument("--responses", metavar="N", type=int, default=16, help=help_text)
    parser.set_defaults(run_command=run)


class Tokens(NamedTuple):
    """Log-probabilities of one response's tokens: of the engine, the trainer, and in float64."""

    number: int  # among all responses of the step
    name: str
    engine: "Tensor"
    trainer: "Tensor"
    exact: "Tensor"


def run(args: argparse.Namespace) -> int:
    """Print the audit.  Return 0 if nothing is off, otherwise 1; or the exit code of ranks that failed."""
    from nemo_prorl import settings
    from nemo_prorl.lifecycle.ledger import read_ledger
    from nemo_prorl.lifecycle.ledger_diff import of_step
    from nemo_prorl.rewards.reverify import judge_again, rollout_files

    run_dir, step = args.run_dir.absolute(), args.step
    if step < 1 or args.responses < 1:
        raise ConfigError(f"--step={step} --responses={args.responses}: expected at least 1")
    folder = run_dir / "audits" / str(step)
    if code := train_again(run_dir, folder, step, step, audit=True):
        return code
    cfg = settings.read_config(folder / "config.yaml")
    dtypes = {"engine": str(cfg.rollout.dtype), "trainer": trainer_dtype(cfg)}
    found = examined(run_dir, folder, step, args.responses, float(cfg.trainer.grpo.temperature))
    off = differences(found, dtypes)
    then, now = (read_ledger(path).get(step) for path in (run_dir, folder))
    parted = of_step(then, now) if then and now else None
    if parted is not None:
        off.append(f"the step is not the same when it is trained again: {parted.words()}")
    summary = judge_again(rollout_files(folder / "rollouts"))
    if summary.changed:
        off.append(f"rewards: {summary.changed} verdicts differ when the responses are judged again")
    show(run_dir, folder, step, found)
    sys.stdout.write("\n".join([*summary.lines(), *(f"off: {one}" for one in off or ["nothing"])]) + "\n")
    return 1 if off else 0


def show(run_dir: Path, folder: Path, step: int, found: Sequence[Tokens]) -> None:
    """Write the page of the examined responses, with their tokens, verdicts and advantages."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from nemo_prorl.lifecycle.batches import read_batch
    from nemo_prorl.replay_training import LOGPROBS
    from nemo_prorl.report.tokens import ShownResponse, write_page

    decode = AutoTokenizer.from_pretrained(folder / "policy", local_files_only=True).decode
    every = [(group, k) for group in read_batch(run_dir, step) for k in range(len(group.responses))]
    advantage_B = load_file(folder / LOGPROBS)["advantage"].tolist()
    shown = []
    for one in found:
        group, k = every[one.number]
        verdict, tokens = group.verdicts[k], [decode([token]) for token in group.responses[k].token_ids]
        heading = f"{one.name}, {group.task} {group.prompt_id}: score {verdict['score']}, advantage"
        shown.append(
            ShownResponse(
                heading=f"{heading} {advantage_B[one.number]:.4g}",
                prompt=decode(group.prompt_ids),
                detail=verdict["detail"],
                tokens=tokens,
                engine=one.engine.tolist(),
                trainer=one.trainer.tolist(),
                exact=one.exact.tolist(),
            )
        )
    write_page(page := folder / "tokens.html", f"{run_dir.name}, step {step}", shown)
    _log.info("their tokens with the probabilities of engine and trainer: %s", page)


def trainer_dtype(cfg: Any) -> str:
    """Return the name of the dtype in which the trainer computes."""
    precision = str(cfg.trainer.precision)
    return next((name for name, key in (("bfloat16", "bf16"), ("float16", "16")) if key in precision), "float32")


def examined(run_dir: Path, folder: Path, step: int, most: int, temperature: float) -> list[Tokens]:
    """Return the responses in which engine and trainer differ most, of those made with the step's weights."""
    from safetensors.torch import load_file

    from nemo_prorl.lifecycle.batches import read_batch
    from nemo_prorl.replay_training import LOGPROBS

    groups, trainer = read_batch(run_dir, step), load_file(folder / LOGPROBS)
    every = [(group, k) for group in groups for k in range(len(group.responses))]
    fresh = [n for n, (g, k) in enumerate(every) if g.version == step - 1 and g.valid[k] and g.responses[k].token_ids]
    if len(fresh) < len(every):
        _log.info("%d of %d responses are left out: older weights, or no verdict", len(every) - len(fresh), len(every))
    if not fresh:
        raise ConfigError(f"--step={step}: all responses were made with older weights. Fix: another step")

    def gap(number: int) -> float:
        group, k = every[number]
        logprobs = group.responses[k].logprobs
        return statistics.fmean(abs(a - b) for a, b in zip(logprobs, trainer[str(number)].tolist(), strict=True))

    chosen = sorted(fresh, key=gap, reverse=True)[:most]
    return exact(folder / "policy", {number: every[number] for number in chosen}, trainer, temperature)


def exact(
    model: Path, chosen: "Mapping[int, tuple[Group, int]]", trainer: "Mapping[str, Tensor]", temperature: float
) -> list[Tokens]:
    """Compute the log-probabilities of responses in float64 with transformers."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    net = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float64).eval()
    made = []
    for number, (group, k) in chosen.items():
        tokens = group.responses[k].token_ids
        with torch.no_grad():
            every_TH = net.model(torch.tensor([[*group.prompt_ids, *tokens]])).last_hidden_state[0]
            hidden_TH = every_TH[-len(tokens) - 1 : -1]
            parts = zip(hidden_TH.split(_AT_ONCE), torch.tensor(tokens)[:, None].split(_AT_ONCE), strict=True)
            logp_T = torch.cat(
                [(net.lm_head(h_TH) / temperature).log_softmax(dim=-1).gather(1, t_T1)[:, 0] for h_TH, t_T1 in parts]
            )
        engine_T = torch.tensor(group.responses[k].logprobs, dtype=torch.float64)
        name = f"response {k} of draw {group.draw_index}"
        made.append(Tokens(number, name, engine_T, trainer[str(number)].double(), logp_T))
    return made


def differences(found: Sequence[Tokens], dtypes: Mapping[str, str]) -> list[str]:
    """Print how far engine and trainer are from float64; return what is farther than its precision explains."""
    import torch

    rows, off = [("log p of tokens", "dtype", "mean |d|", "largest |d|", "in")], []
    for side, dtype in dtypes.items():
        gaps = [(getattr(one, side) - one.exact).abs() for one in found]
        mean, allowed = float(torch.cat(gaps).mean()), ALLOWED.get(dtype, ALLOWED["float32"])
        worst = max(range(len(found)), key=lambda n: float(gaps[n].max()))
        where = f"{found[worst].name}, token {int(gaps[worst].argmax())}"
        rows.append((side, dtype, f"{mean:.3g}", f"{float(gaps[worst].max()):.3g}", where))
        if not mean <= allowed:
            off.append(f"{side}: {mean:.3g} nats per token from float64, expected at most {allowed:g} in {dtype}")
    tokens = sum(len(one.exact) for one in found)
    sys.stdout.write(f"{tokens} tokens of {len(found)} responses, in which engine and trainer differ most\n")
    sys.stdout.write(columns(rows))
    return off
