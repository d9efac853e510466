"""The controller of the entropy bonus."""

import json

import pytest

from nemo_prorl.algorithms.entropy import AdaptiveEntropy
from nemo_prorl.config import AdaptiveEntropyConfig


def test_controller_by_hand() -> None:
    controller = AdaptiveEntropy(AdaptiveEntropyConfig(target=0.2, step=0.25, maximum=0.6))
    given = [controller.update(entropy) for entropy in (0.1, 0.1, 0.1, 0.1, 0.5, 0.2, 0.1, 0.5, 0.5, 0.5, 0.1)]
    # c before each step: 0, .25, .5, .6 (bounded), .6, .35, .35, .6, .35, .1, 0 (bounded); 0 is given above the target.
    assert given == pytest.approx([0.0, 0.25, 0.5, 0.6, 0.0, 0.35, 0.35, 0.0, 0.0, 0.0, 0.0])


def test_controller_resumes_exactly() -> None:
    config = AdaptiveEntropyConfig(target=0.3)
    first, second = AdaptiveEntropy(config), AdaptiveEntropy(config)
    for entropy in (0.1, 0.2, 0.1, 0.4):
        first.update(entropy)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [first.update(0.1) for _ in range(5)] == [second.update(0.1) for _ in range(5)]
