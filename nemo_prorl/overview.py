"""Plain tables for a terminal: a run before it starts (`prorl plan`) and while it is under way (`prorl status`)."""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from nemo_prorl.errors import ConfigError
from nemo_prorl.settings import read_config


def plan(cfg: DictConfig) -> str:
    """What a resolved configuration will do, one line a matter."""
    trainer, grpo, model, rollout = cfg.trainer, cfg.trainer.grpo, cfg.model, cfg.rollout
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    ranks = trainer.num_nodes * trainer.devices
    responses = grpo.prompts_per_step * grpo.samples_per_prompt
    resets = ", ".join(map(str, trainer.resets.at_steps)) or "at no fixed step"
    rows = {
        "run directory": cfg.run_dir,
        "stage": cfg.stage,
        "seed": f"{cfg.seed}{' (deterministic)' if cfg.deterministic else ''}",
        "policy": f"{model.num_layers} layers x {model.hidden_size}, {model.num_attention_heads} heads,"
        f" {model.num_query_groups} query groups, {_millions(model):.1f} million parameters without the vocabulary",
        "first weights": cfg.pretrained_checkpoint.restore_from_path or "random, with a tokenizer made for the data",
        "machines": f"{trainer.num_nodes} x {trainer.devices} {trainer.accelerator}, precision {trainer.precision}",
        "parallel layout": f"TP {tp} x PP {pp} x DP {ranks // (tp * pp)}",
        "rollout engines": f"{rollout.engines} x TP {rollout.tensor_parallel_size}, {rollout.dtype}",
        "warm-up": f"{trainer.warmup.steps} steps of {trainer.warmup.batch_size}, lr {trainer.warmup.lr:g}",
        "steps": grpo.max_steps,
        "a step": f"{grpo.prompts_per_step} prompts x {grpo.samples_per_prompt} = {responses} responses,"
        f" {grpo.updates_per_step} updates of {responses // grpo.updates_per_step}, lr {model.optim.lr:g}",
        "context": f"{grpo.context_tokens} tokens, temperature {grpo.temperature:g}",
        "loss": f"{grpo.advantage}, {grpo.aggregation}, clip {grpo.clip_low:g}/{grpo.clip_high:g},"
        f" KL {grpo.kl_coef:g} ({grpo.kl_estimator}), correction {grpo.correction.kind}",
        "dynamic sampling": f"up to {grpo.dynamic_sampling.max_draw_factor:g} x the prompts"
        if grpo.dynamic_sampling.enabled
        else "off",
        "hard resets": f"{trainer.resets.mode}; {resets}",
        "checkpoints": f"every {grpo.checkpoint_every} steps, {grpo.keep_checkpoints} kept",
        "validation": f"every {grpo.validate_every} steps, {grpo.validation_samples} a prompt, temperature"
        f" {grpo.validation_temperature:g}",
        "data": ", ".join(f"{s.name} ({s.weight:g})" for s in cfg.data.train),
        "held out": ", ".join(s.name for s in cfg.data.validation) or "nothing",
    }
    return _table(rows)


def status(run_dir: Path) -> str:
    """Where the run of a run directory is, from the files in it; raises ConfigError where it holds none."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} holds no run: it has no config.yaml")
    cfg = read_config(run_dir / "config.yaml")
    metrics, journal = _last_line(run_dir / "metrics.jsonl"), _last_line(run_dir / "journal.jsonl")
    summary = run_dir / "summary.json"
    finished = summary.is_file() and json.loads(summary.read_text()).get("finished", False)
    checkpoints = sorted(p.name for p in (run_dir / "checkpoints").glob("step-*") if p.is_dir())
    rows: dict[str, Any] = {
        "run directory": run_dir,
        "stage": cfg.stage,
        "step": f"{metrics.get('step', 0)} of {cfg.trainer.grpo.max_steps}{', finished' if finished else ''}",
        "last checkpoint": checkpoints[-1] if checkpoints else "none",
    }
    for key, value in metrics.items():
        if key in ("kl", "entropy") or key.startswith(("reward/", "keep_rate/", "validation/")):
            rows[key] = f"{value:.6g}" if isinstance(value, float) else value
    if journal:
        rows["journal"] = json.dumps(journal)
    return _table(rows)


def _last_line(path: Path) -> dict[str, Any]:
    """The last whole JSON line of a file, or nothing; a line that is just being written is passed over."""
    lines = path.read_text().splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            read: dict[str, Any] = json.loads(line)
            return read
        except ValueError:
            continue
    return {}


def _millions(model: DictConfig) -> float:
    """Parameters of the transformer layers in millions: attention, gate, up and down projections."""
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_query_groups
    attention = 2 * hidden * hidden + 2 * hidden * hidden // heads * groups
    return float(model.num_layers * (attention + 3 * hidden * model.ffn_hidden_size) / 1e6)


def _table(rows: dict[str, Any]) -> str:
    width = max(map(len, rows))
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows.items())
