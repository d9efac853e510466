"""The keys that decide the algorithm of a run, for `prorl plan`.  The schema decides which keys these are."""

from textwrap import wrap
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.config import all_keys
from nemo_prorl.config_changes import may_change
from nemo_prorl.value_types import shown

# Other rows of the plan show these keys and sections: machine, model, data, rewards and the link to another run.
_ELSEWHERE = (
    "stage",
    "seed",
    "deterministic",
    "trainer.accelerator",
    "model",
    "pretrained_checkpoint",
    "rewards",
    *(f"data.{name}" for name in ("train", "validation", "tasks", "prompt", "system", "templates", "folder")),
    "chain",
)
_YET = (
    "trainer.resets",
    "trainer.grpo.old_logp",
    "model.optim",
    "model.fp8",
    "model.fp8_recipe",
)  # they decide the algorithm all the same
_WIDTH = 100  # characters of a row's second column


def algorithm(cfg: DictConfig) -> dict[str, Any]:
    """Return {key: value} of each key that decides the algorithm: loss, sampling, optimizer, resets and so on.

    These are the keys of the schema that a continued run may not change, and all keys of `trainer.resets`, without the
    sections that other rows of the plan show.
    """
    values = {}
    for key in all_keys():
        if _is_in(key.name, _YET) or not (may_change(key.name) or _is_in(key.name, _ELSEWHERE)):
            value = OmegaConf.select(cfg, key.name)
            if not OmegaConf.is_dict(value):
                values[key.name] = OmegaConf.to_object(value) if OmegaConf.is_list(value) else value
    return values


def _is_in(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def rows(cfg: DictConfig) -> list[tuple[str, str]]:
    """Return (section, `KEY VALUE, ...`) for each section of `algorithm`; a long section continues in further rows."""
    sections: dict[str, list[str]] = {}
    for key, value in algorithm(cfg).items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name}\xa0{_text(value)}")  # wrap does not part them
    lines = {
        section: wrap(", ".join(texts), _WIDTH, break_long_words=False, break_on_hyphens=False)
        for section, texts in sections.items()
    }
    return [
        (section if number == 0 else "", line.replace("\xa0", " "))
        for section, wrapped in lines.items()
        for number, line in enumerate(wrapped)
    ]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else shown(value)
