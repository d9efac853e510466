"""The data of a run: files that are there, and a source for each task.  A start judges by the same function."""

from collections.abc import Iterator

from omegaconf import DictConfig

from nemo_prorl.data.prepared import faults
from nemo_prorl.launcher.doctor.check import Check


def of_run(cfg: DictConfig) -> Iterator[Check]:
    found = faults(cfg)
    for fault in found:
        yield Check("data", "fail", fault)
    if not found:
        yield Check("data", "pass", ", ".join(source.name for source in (*cfg.data.train, *cfg.data.validation)))
