"""`prorl audit`: computes a stored step again in other ways, and says whether engine, trainer or rewards are off.

- The trainer trains the step again (`prorl replay-training`): all digests must be equal.
- transformers computes the log-probabilities of the recorded tokens in float64, with the weights before the step.  The
  engine's recorded ones, and the trainer's of the replay, must be near them.
- An engine is given the recorded tokens (`report.audit_engine`), with these weights and with older ones: is it near
  float64, and are the recorded ones those of these weights?
- The plugins judge the responses again.
"""

import argparse
import logging
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.errors import ConfigError, ProrlError, StoppedCleanly
from nemo_prorl.launcher.replayed import train_again
from nemo_prorl.planning.columns import columns

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_prorl.report.step_groups import StoredStep
    from nemo_prorl.rollout.groups import Group

_log = logging.getLogger(__name__)

ALLOWED = {"float32": 0.001, "bfloat16": 0.1, "float16": 0.1}  # mean difference per token from float64, in nats

_NEARER = 2.0  # weights explain the recorded log-probabilities if others are this many times farther from them
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


@dataclass(frozen=True)
class Tokens:
    """Log-probabilities of one response's tokens: of the engine, the trainer, and in float64."""

    number: int  # among all responses of the step
    name: str
    engine: "Tensor"
    trainer: "Tensor"
    exact: "Tensor"
    forced: "Mapping[int, Tensor]" = field(
        default_factory=dict
    )  # of an engine that was given the tokens, by version of its weights


def run(args: argparse.Namespace) -> int:
    """Print the audit.  Return 0 if nothing is off, otherwise 1; or the exit code of ranks that failed."""
    from nemo_prorl import settings
    from nemo_prorl.lifecycle.ledger import read_ledger
    from nemo_prorl.lifecycle.ledger_diff import of_step
    from nemo_prorl.report.step_groups import StoredStep
    from nemo_prorl.report.tokens import write_page
    from nemo_prorl.rewards.reverify import judge_again, rollout_files

    run_dir, step = args.run_dir.absolute(), args.step
    if step < 1 or args.responses < 1:
        raise ConfigError(f"--step={step} --responses={args.responses}: expected at least 1")
    folder = run_dir / "audits" / str(step)
    if code := train_again(run_dir, folder, step, step, audit=True):
        return code
    cfg = settings.read_config(folder / "config.yaml")
    stored = StoredStep(run_dir, step)
    chosen = examined(stored, folder, args.responses)
    chosen = with_engine(cfg, stored, folder, chosen)
    off = differences(chosen, {"engine": str(cfg.rollout.dtype), "trainer": trainer_dtype(cfg)}, step - 1)
    then, now = (read_ledger(path).get(step) for path in (run_dir, folder))
    parted = of_step(then, now) if then and now else None
    if parted is not None:
        off.append(f"the step is not the same when it is trained again: {parted.words()}")
    summary = judge_again(rollout_files(folder / "rollouts"))
    if summary.changed:
        off.append(f"rewards: {summary.changed} verdicts differ when the responses are judged again")
    write_page(page := folder / "tokens.html", stored.title, stored.shown({one.number: named(one) for one in chosen}))
    _log.info("their tokens with the probabilities of engine and trainer: %s", page)
    sys.stdout.write("\n".join([*summary.lines(), *(f"off: {fault}" for fault in off or ["nothing"])]) + "\n")
    return 1 if off else 0


def named(response: Tokens) -> dict[str, list[float]]:
    """Return a response's log-probabilities by whose they are, as the page shows them."""
    forced = {f"engine with weights {version}": logp_T for version, logp_T in response.forced.items()}
    sides = {"engine": response.engine, "trainer": response.trainer, "float64": response.exact, **forced}
    return {name: logp_T.tolist() for name, logp_T in sides.items()}


def with_engine(cfg: Any, stored: "StoredStep", folder: Path, chosen: Sequence[Tokens]) -> list[Tokens]:
    """Add the log-probabilities of an engine that is given the tokens; without one, say so and add nothing."""
    from nemo_prorl.report.audit_engine import engine_logprobs

    _log.info("starting an engine, which is given the tokens; its log is %s", folder / "logs" / "engine-0.log")
    try:
        made = engine_logprobs(cfg, stored, folder, [response.number for response in chosen])
    except StoppedCleanly:
        raise
    except (ProrlError, OSError) as error:
        sys.stdout.write(f"no engine could be asked: {error}\n")
        return list(chosen)
    return [
        replace(one, forced={version: values[n] for version, values in made.items()}) for n, one in enumerate(chosen)
    ]


def trainer_dtype(cfg: Any) -> str:
    """Return the name of the dtype in which the trainer computes."""
    precision = str(cfg.trainer.precision)
    return next((name for name, key in (("bfloat16", "bf16"), ("float16", "16")) if key in precision), "float32")


def examined(stored: "StoredStep", folder: Path, most: int) -> list[Tokens]:
    """Return the responses in which engine and trainer differ most, of those made with the step's weights."""
    from safetensors.torch import load_file

    from nemo_prorl.replay_training import LOGPROBS, POLICY

    trainer, every, version = load_file(folder / LOGPROBS), stored.responses, stored.step - 1
    fresh = [n for n, (g, k) in enumerate(every) if g.version == version and g.valid[k] and g.responses[k].token_ids]
    if len(fresh) < len(every):
        _log.info("%d of %d responses are left out: older weights, or no verdict", len(every) - len(fresh), len(every))
    if not fresh:
        raise ConfigError(f"--step={stored.step}: all responses were made with older weights. Fix: another step")

    def gap(number: int) -> float:
        group, k = every[number]
        logprobs = group.responses[k].logprobs
        return statistics.fmean(abs(a - b) for a, b in zip(logprobs, trainer[str(number)].tolist(), strict=True))

    chosen = sorted(fresh, key=gap, reverse=True)[:most]
    temperature = float(stored.cfg.trainer.grpo.temperature)
    return exact(folder / POLICY, {number: every[number] for number in chosen}, trainer, temperature)


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


def differences(chosen: Sequence[Tokens], dtypes: Mapping[str, str], version: int) -> list[str]:
    """Print how far the sides are from float64; return what is farther than its precision explains.

    Args:
        dtypes: of `engine` and `trainer`.
        version: of the weights that the step begins with.
    """
    sides = {side: [getattr(response, side) for response in chosen] for side in dtypes}
    if chosen[0].forced:
        sides["engine, given the tokens"] = [response.forced[version] for response in chosen]
    rows, off = [("log p of tokens", "dtype", "mean |d|", "largest |d|", "in")], {}
    for side, values in sides.items():
        gaps = [(value - response.exact).abs() for value, response in zip(values, chosen, strict=True)]
        dtype = dtypes[side.partition(",")[0]]
        mean, allowed = _mean(values, [response.exact for response in chosen]), ALLOWED.get(dtype, ALLOWED["float32"])
        worst = max(range(len(chosen)), key=lambda n: float(gaps[n].max()))
        where = f"{chosen[worst].name}, token {int(gaps[worst].argmax())}"
        rows.append((side, dtype, f"{mean:.3g}", f"{float(gaps[worst].max()):.3g}", where))
        if not mean <= allowed:
            off[side] = f"{side}: {mean:.3g} nats per token from float64, expected at most {allowed:g} in {dtype}"
    tokens = sum(len(response.exact) for response in chosen)
    sys.stdout.write(f"{tokens} tokens of {len(chosen)} responses, in which engine and trainer differ most\n")
    sys.stdout.write(columns(rows))
    return _with_cause(chosen, off, version) if chosen[0].forced else list(off.values())


def _with_cause(chosen: Sequence[Tokens], off: dict[str, str], version: int) -> list[str]:
    """Print which weights explain the engine's recorded log-probabilities; return `off` with the cause."""
    recorded = [response.engine for response in chosen]
    gaps = {made: _mean(recorded, [response.forced[made] for response in chosen]) for made in chosen[0].forced}
    rows = [("engine with the weights after step", "mean |d| from the recorded log p")]
    sys.stdout.write(columns([*rows, *((str(made), f"{gap:.3g}") for made, gap in gaps.items())]))
    fault = off.pop("engine, given the tokens", None)
    nearest = min(gaps, key=lambda made: gaps[made])
    if nearest != version and gaps[nearest] < gaps[version] / _NEARER:
        off["engine"] = (
            f"engine: it had the weights after step {nearest}: {gaps[nearest]:.3g} nats per token from the recorded"
            f" log-probabilities, those after step {version} {gaps[version]:.3g}"
        )
    elif fault:
        off["engine"] = f"{fault}: its kernels, or how it loads weights"
    elif "engine" in off:
        right = f"an engine with the weights after step {version} that is given the tokens is right"
        off["engine"] += f"; {right}: its decode was off, unless it had yet other weights"
    return list(off.values())


def _mean(ones: "Sequence[Tensor]", others: "Sequence[Tensor]") -> float:
    """Return the mean absolute difference over all tokens."""
    import torch

    return float((torch.cat(list(ones)) - torch.cat(list(others))).abs().mean())
