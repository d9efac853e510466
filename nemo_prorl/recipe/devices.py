"""How many GPUs a run uses."""

from omegaconf import DictConfig, OmegaConf


def node_devices(cfg: DictConfig) -> int:
    """GPUs that a node of the run uses (CPU: processes that compute): the trainer's, then the engines' own."""
    if not OmegaConf.select(cfg, "rollout.own_devices"):  # runs made before there was this key have none
        return int(cfg.trainer.devices)
    return int(cfg.trainer.devices + cfg.rollout.engines // cfg.trainer.num_nodes * cfg.rollout.tensor_parallel_size)


def devices_words(cfg: DictConfig) -> str:
    """The keys that `node_devices` follows from, with their values."""
    own = node_devices(cfg) - cfg.trainer.devices
    return f"trainer.devices={cfg.trainer.devices}" + (f" + {own} of rollout.own_devices" if own else "")
