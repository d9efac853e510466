"""A program that prints what a configuration needs from a Slurm job, as one line of JSON, for `slurm_driver`.

python -m nemo_prorl.launcher.allocation OVERRIDE ...     exit code 2: the configuration is wrong
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from nemo_prorl.errors import ProrlError
from nemo_prorl.sizing.devices import devices_words, node_devices

_log = logging.getLogger(__name__)


def allocation(cfg: DictConfig) -> dict[str, Any]:
    paths = [source.path for source in (*cfg.data.train, *cfg.data.validation) if source.path is not None]
    return {
        "num_nodes": cfg.trainer.num_nodes,
        "devices": node_devices(cfg),
        "devices_words": devices_words(cfg),
        "engines": cfg.rollout.engines,
        "accelerator": cfg.trainer.accelerator,
        "attempts": cfg.launch.attempts,
        "env": dict(cfg.launch.env),
        "on_event": cfg.on_event,
        "reads_data_folder": any(Path(cfg.data.folder) in Path(path).parents for path in paths),
    }


def main() -> int:
    from nemo_prorl import settings

    logging.basicConfig(level=logging.INFO, format="prorl: %(message)s", stream=sys.stderr)
    try:
        cfg = settings.load_run(sys.argv[1:])
    except ProrlError as error:
        _log.error("%s", error)
        return error.exit_code
    sys.stdout.write(json.dumps(allocation(cfg)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
