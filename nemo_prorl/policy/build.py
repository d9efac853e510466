"""Builds an actor from a configuration, with the utilities that NeMo-Aligner's own training scripts use."""

import logging
import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from nemo_prorl import device
from nemo_prorl.checks import check_shape
from nemo_prorl.errors import ConfigError
from nemo_prorl.policy.cpu import shims as cpu

_log = logging.getLogger(__name__)

LIGHTNING_KEYS = {  # values of trainer.* that users cannot set: Lightning's own features are off
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "max_epochs": 1,
    "max_steps": 1_000_000_000,
}


@dataclass(frozen=True)
class ActorAndLightningTrainer:
    """An actor, and the Lightning trainer of its model, which has the loggers."""

    actor: Any
    trainer: Any  # lightning.pytorch.Trainer


def nemo_config(cfg: DictConfig, hf_folder: Path, hf: dict[str, Any], log_dir: Path | None) -> DictConfig:
    """Return the configuration in NeMo-Aligner's form: `trainer` (with `grpo`), `model`, `exp_manager`.

    Args:
        hf_folder: folder of the model's tokenizer.
        hf: the model's config.json.
        log_dir: folder of NeMo's logs; None: without exp_manager.
    """
    model: dict = OmegaConf.to_container(cfg.model, resolve=True)  # type: ignore[assignment]
    world = cfg.trainer.num_nodes * cfg.trainer.devices
    layout = model["tensor_model_parallel_size"] * model["pipeline_model_parallel_size"]
    multiple = model["make_vocab_size_divisible_by"]
    model |= {
        # The padded size does not depend on the parallel layout, so that checkpoints load at any layout.
        "override_vocab_size": -(-hf["vocab_size"] // multiple) * multiple,
        "precision": cfg.trainer.precision,
        "seed": cfg.seed,
        "global_batch_size": model["micro_batch_size"] * max(1, world // layout),
        "tokenizer": {"library": "huggingface", "type": str(hf_folder), "use_fast": True},
        "data": {},
    }
    model["optim"].pop("sched", None)  # `algorithms.schedule` computes the learning rate; NeMo has its own schedulers
    if model.get("qk_layernorm"):
        model["name"] = "decoder_block_gpt"  # NeMo's other specs of Transformer Engine's layers leave these norms out
    fp8 = model.pop("fp8", None)  # NeMo has three keys instead of this one
    model |= {"fp8": fp8 is not None, "fp8_hybrid": fp8 == "hybrid", "fp8_e4m3": fp8 == "e4m3"}
    if fp8 is None:
        model.pop("fp8_recipe", None)
    user_keys = ("num_nodes", "devices", "accelerator", "precision", "gradient_clip_val")
    trainer = {key: cfg.trainer[key] for key in user_keys} | LIGHTNING_KEYS | {"grpo": {}}
    exp = dict(cfg.exp_manager) | {"explicit_log_dir": str(log_dir)} if log_dir is not None else None
    return OmegaConf.create({"trainer": trainer, "model": model, "exp_manager": exp})


def build_actor(cfg: DictConfig, hf_folder: str | Path, log_dir: Path | None = None) -> ActorAndLightningTrainer:
    """Build the actor on this rank, with policy and reference policy from the weights of a Hugging Face folder.

    The ranks are read from torchrun's environment variables; without these there is one rank.

    Raises:
        ConfigError: `model` differs from the folder's config.json, or WORLD_SIZE from the configured number of ranks.
    """
    from nemo_prorl.policy.weights import HFFolder

    folder = HFFolder(hf_folder)
    check_shape(cfg.model, folder.config, str(folder.path))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world != cfg.trainer.num_nodes * cfg.trainer.devices:
        raise ConfigError(
            f"WORLD_SIZE={world}: expected trainer.num_nodes={cfg.trainer.num_nodes} x"
            f" trainer.devices={cfg.trainer.devices} ranks; {world} were started"
        )
    warnings.filterwarnings("ignore")
    logging.getLogger("nemo_logger").addFilter(_is_worth_logging)
    cpu.enable(bool(cfg.model.get("transformer_engine")))
    built = _build(nemo_config(cfg, folder.path.resolve(), folder.config, log_dir), cfg, folder.config)
    built.actor.whole_weights.load(folder)
    built.actor.reload_masters()
    built.actor.set_reference()
    return built


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for a message of NeMo that a setting is not configured; there are about 120 at each start."""
    return "does not have field.name" not in record.getMessage()


def _build(nemo_cfg: DictConfig, cfg: DictConfig, hf: dict[str, Any]) -> ActorAndLightningTrainer:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from nemo.utils.exp_manager import exp_manager
    from nemo_aligner.utils import train_script_utils as script

    from nemo_prorl.policy.actor import Actor, ActorModel

    trainer = script.resolve_and_create_trainer(nemo_cfg, "grpo")
    if nemo_cfg.exp_manager is not None:
        exp_manager(trainer, nemo_cfg.exp_manager)
    trainer.strategy._timeout = timedelta(seconds=cfg.trainer.deadlines.collective_s)
    torch.manual_seed(cfg.seed)
    model = ActorModel(nemo_cfg.model, trainer)
    script.init_distributed(trainer, model, bool(nemo_cfg.model.transformer_engine))
    if not device.has_gpu():
        model_parallel_cuda_manual_seed(cfg.seed)  # NeMo seeds Megatron's generators only if it counts a GPU
    data = torch.utils.data.TensorDataset(torch.arange(1))
    script.init_using_ptl(trainer, model, torch.utils.data.DataLoader(data, batch_size=1), data)
    optimizer, _ = script.extract_optimizer_scheduler_from_ptl_model(model)
    grpo = cfg.trainer.grpo
    chunk = (grpo.logprob_chunk_tokens, grpo.logprob_chunk_words)
    actor = Actor(
        model, optimizer, temperature=grpo.temperature, hf_config=hf, chunk=chunk, float32_head=grpo.float32_head
    )
    return ActorAndLightningTrainer(actor, trainer)
