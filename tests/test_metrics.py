"""The numbers of a step: averaged, reduced, and taken through a checkpoint."""

import json

from nemo_prorl.metrics import Metrics


def test_metrics_go_on_from_a_checkpoint_as_they_were() -> None:
    """Those of a step whose validation was given up: also what is put later must come out the same."""
    metrics = Metrics(3, "run1")
    metrics.put("policy/ratio", 1.0 / 3.0, 2.0)
    metrics.put("policy/max_ratio", 1.5)
    metrics.put("kl", float("nan"))
    again = Metrics.from_json(json.loads(json.dumps(metrics.to_json())))
    for one in (metrics, again):
        one.put("policy/ratio", 0.7)
        one.put("policy/max_ratio", 1.2)
        one.put("validation/all", 0.1)
    assert again.as_json() == metrics.as_json()
    assert (again.step, again.stage) == (3, "run1")
    assert again["policy/ratio"] == (2.0 / 3.0 + 0.7) / 3.0
    assert again["policy/max_ratio"] == 1.5
