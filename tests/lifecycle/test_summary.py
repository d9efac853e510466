"""The scores of a validation by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_prorl.config import Config
from nemo_prorl.errors import RewardFailure
from nemo_prorl.lifecycle.run_records import Records
from nemo_prorl.lifecycle.summary import heldout_scores, standard_errors
from tests.rollout.test_collector import group_of


def test_a_score_is_the_mean_over_prompts_with_its_standard_error() -> None:
    groups = [group_of(scores) for scores in ([1.0, 0.0, 1.0, 0.0], [1.0, 1.0], [0.25])]
    scores = heldout_scores(["math", "math", "code"], groups)
    of_math = {"mean": 0.75, "se": pytest.approx(0.25), "prompts": 2}
    of_all = {"mean": pytest.approx(7 / 12), "se": pytest.approx(math.sqrt(7 / 24 / 2 / 3)), "prompts": 3}
    assert scores == {"all": of_all, "tasks": {"math": of_math, "code": {"mean": 0.25, "se": 0.0, "prompts": 1}}}
    assert standard_errors(scores) == {"math": of_math["se"], "code": 0.0}
    assert standard_errors(None) == {}


def test_a_validation_judges_every_response_or_none_counts() -> None:
    groups = [group_of([1.0]), replace(group_of([1.0, None]), prompt_id="held-3")]
    with pytest.raises(RewardFailure, match="validation: prompt held-3 of math could not be judged"):
        heldout_scores(["math", "math"], groups)


def test_the_disagreements_of_a_step_replace_those_of_its_first_attempt(tmp_path: Path) -> None:
    records = Records(Config(), tmp_path, writes=True)
    records.disagreements(3, [{"id": "a"}, {"id": "b"}])
    file = tmp_path / "disagreements" / "step-3.jsonl"
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == ["a", "b"]
    records.disagreements(3, [])
    assert not file.exists()
