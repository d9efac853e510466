"""`prorl replay-training`: what it refuses; tests/test_main_job.py replays a real run."""

import pytest

from nemo_prorl import cli


@pytest.mark.parametrize(
    "key", ["trainer.grpo.samples_per_prompt=8", "run_dir=x", "+data.prompt=chat", "trainer.resets.every=3"]
)
def test_a_key_without_effect_on_stored_responses_is_refused(key: str, caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["replay-training", "run", "--from", "1", "--with", "model.optim.lr=1e-4", key]) == 2
    assert f"--with {key}: expected a key of the loss, the optimizer or the shaping" in caplog.text
    assert cli.main(["replay-training", "run", "--from", "1", "--with", "trainer.resets.lr_factor=1"]) == 2
    assert "run is not a run directory" in caplog.text
