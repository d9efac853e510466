"""Which keys NeMo's section `model` may have: those that the installed NeMo, Megatron or this project read."""

import difflib
import functools
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig

from nemo_prorl.config import all_keys

# What reads NeMo's section `model`, below the folders of these packages.
_READERS = {
    "nemo": (
        "collections/nlp/models/language_modeling/megatron_base_model.py",
        "collections/nlp/models/language_modeling/megatron_gpt_model.py",
        "collections/nlp/models/nlp_model.py",
        "collections/nlp/parts/megatron_trainer_builder.py",
        "core/classes/modelPT.py",
    ),
    "megatron": ("core/transformer/transformer_config.py", "core/model_parallel_config.py"),
}
_READ = re.compile(r"(?m)(?:cfg|optim|optim_config)\.get\(\s*[\"'](\w+)|cfg\.(?=(?:model\.)?(\w+))|^    (\w+): ")
_ADAPTER = re.compile(r"lora|peft|adapter", re.IGNORECASE)
# Keys that NeMo reads, and that the run sets from another key.
_SET = {
    "precision": "trainer.precision",
    "seed": "seed",
    "global_batch_size": "trainer.grpo.prompts_per_step",
    "tokenizer": "pretrained_checkpoint.restore_from_path",
    "data": "data.train",
    "override_vocab_size": "pretrained_checkpoint.restore_from_path",
}


def adapter_fault(key: str) -> str | None:
    """Return that LoRA and other adapters are not supported, if a key asks for one."""
    fix = "Fix: leave the key out; if memory is short, more GPUs or a smaller model"
    return f"adapters such as LoRA are not supported; all weights are trained. {fix}" if _ADAPTER.search(key) else None


@functools.lru_cache
def _read_by_nemo() -> frozenset[str]:
    """Return the names of the keys that NeMo and Megatron read, from their code; empty if they are not installed."""
    names: set[str] = set()
    for package, files in _READERS.items():
        spec = find_spec(package)  # of a package without a parent, which would be imported
        if spec is None or not spec.submodule_search_locations:
            return frozenset()
        for file in files:
            code = Path(spec.submodule_search_locations[0], file).read_text()
            names |= {name for match in _READ.findall(code) for name in match}
    return frozenset(names)


def is_read(key: str) -> bool:
    """Return whether NeMo or this project reads a key: true for other sections than `model`, or where it is unknown."""
    section, *_, last = key.split(".")
    return section != "model" or not (read := _read_by_nemo()) or last in read | _own_model_keys()


def _own_model_keys() -> set[str]:
    return {part for key in all_keys() if key.name.startswith("model.") for part in key.name.split(".")}


def check_model_keys(cfg: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield each key of `model` and `model.optim` that NeMo and this project do not read, and what is expected."""
    for name in [*cfg.model, *(f"optim.{name}" for name in cfg.model.optim)]:
        key, last = f"model.{name}", name.rpartition(".")[2]
        if fault := adapter_fault(key):
            yield key, fault
        if name in _SET:
            yield key, f"the run sets it. Fix: {_SET[name]} instead"
        if not is_read(key):
            near = difflib.get_close_matches(last, _read_by_nemo() | _own_model_keys(), n=1, cutoff=0.75)
            fix = f"{key.removesuffix(last)}{near[0]} instead" if near else "leave it out"
            yield key, f"neither NeMo nor this project reads this key. Fix: {fix}"
