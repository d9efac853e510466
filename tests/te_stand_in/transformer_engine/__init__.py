"""A stand-in for NVIDIA's Transformer Engine, on CPUs, for tests only.

It proves wiring, not kernels: that Megatron's Transformer Engine layers are built, sharded, saved, loaded and updated
by this project as they must be, with the names, defaults, checks, laziness and FP8 rounding of Transformer Engine.
It does not prove speed, memory, accumulation order, kernel choice, or that a GPU accepts what a CPU accepts.

Written from Transformer Engine's documented behaviour.  tests/policy/te_signatures.py compares signatures.

TE_STAND_IN_VERSION: the version that the stand-in reports.  The default is the commit that NVIDIA's NeMo 2.3
containers build; FP8 weights that such a version caches without gradients cannot be used with gradients later.
Any version from 2.2.0 on does not have this fault.
"""

import os

from packaging.version import Version

__version__ = os.environ.get("TE_STAND_IN_VERSION", "2.2.0.dev0+bee4649")
KEEPS_WEIGHTS_WITHOUT_TRANSPOSE = Version(__version__) < Version("2.2.0")

from transformer_engine import common as common  # noqa: E402
from transformer_engine import pytorch as pytorch  # noqa: E402
