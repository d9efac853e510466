"""When the reference policy and the optimizer are reset (paper sec. 3.3.1), and the check that a reset is one."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from nemo_prorl.algorithms.reset import Finding, History, Rules, decide
from nemo_prorl.config import ResetRulesConfig, ResetsConfig
from nemo_prorl.errors import ResetFailure
from nemo_prorl.metrics import Metrics


def rules_of(config: ResetRulesConfig) -> Rules:
    """The rules' settings as plain values."""
    values = {name: getattr(config, name) for name in Rules.__dataclass_fields__}
    return Rules(**{**values, "asks": tuple(config.asks)})


class Resets:
    """Decides on hard resets, and checks that the step after one sees the policy equal to its reference.

    Rank 0 alone keeps the history that the rules decide by; what they find there all ranks are told.
    """

    def __init__(self, config: ResetsConfig, kl_allowed: float = 0.0) -> None:
        """`kl_allowed`: the difference from its reference that the step after a reset may show."""
        self.config, self._kl_allowed = config, kl_allowed
        self.done: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []  # findings, as a resumed history must know them
        self._fresh = True  # at a run's start the policy is its reference too
        self._history = History()

    def observe(self, line: Mapping[str, Any], scores: Mapping[str, Any] | None) -> list[Finding]:
        """Rank 0, once a step: what the rules say of a line of metrics.jsonl and the validation of its step, if any."""
        self._history.add(line, standard_errors(scores))
        return [] if self.config.mode == "manual" else decide(self._history, rules_of(self.config.rules))

    def decide(self, metrics: Metrics, findings: Iterable[Finding]) -> str | None:
        """The reason to reset after this step's updates, if there is one.  Every rank, with rank 0's findings."""
        findings = list(findings)
        self._history.note(findings)
        self.told += [asdict(finding) for finding in findings]
        if metrics.step in self.config.at_steps:
            return "at_steps"
        if self.config.every is not None and metrics.step % self.config.every == 0:
            return "every"
        asking = [str(finding) for finding in findings if finding.asks]
        return asking[0] if asking and self.config.mode == "auto" else None

    def recall(self, lines: Iterable[Mapping[str, Any]], validations: Mapping[int, Mapping[str, Any]]) -> None:
        """Rank 0, at a resume, after `load_state_dict`: the history from the lines of metrics.jsonl that count."""
        self._history = History()
        resets = {reset["step"] for reset in self.done}
        told: dict[int, list[Finding]] = {}
        for finding in self.told:
            told.setdefault(finding["step"], []).append(Finding(**finding))
        for line in lines:
            step = int(line["step"])
            self._history.add(line, standard_errors(validations.get(step)))
            self._history.note(told.get(step, []))
            if step in resets:
                self._history.reset(step)

    def record(self, step: int, reason: str, reference_sha256: str, rolled_back_to: int | None = None) -> None:
        """A reset that is made now."""
        reset = {"step": step, "reason": reason, "reference_sha256": reference_sha256}
        self.done.append(reset if rolled_back_to is None else {**reset, "rolled_back_to": rolled_back_to})
        self._history.reset(step)
        self._fresh = self.config.parts != "optimizer"

    def continue_reference(self) -> None:
        """A stage begins without a reset: its reference is not the policy."""
        self._fresh = False

    @property
    def steps(self) -> list[int]:
        """After which steps there were resets; 0: at the start of a stage."""
        return [reset["step"] for reset in self.done]

    def check_reference(self, step: int, mean_abs_gap: float) -> None:
        """Before a step's updates.  Raises ResetFailure if the policy should be its reference and is not."""
        fresh, self._fresh = self._fresh, False
        if fresh and not mean_abs_gap <= self._kl_allowed:
            raise ResetFailure(
                f"step {step} follows a reset, but policy and reference differ by {mean_abs_gap:.3g} on average"
                f" ({self._kl_allowed:g} is allowed: trainer.resets.kl_after_reset)"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "fresh": self._fresh, "told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self._fresh, self.told = list(state["done"]), bool(state["fresh"]), list(state["told"])


def policy_scores(
    validations: Mapping[int, Mapping[str, Any]], resets: Iterable[Mapping[str, Any]]
) -> dict[int, float]:
    """Mean validation scores by step, each of the weights that the checkpoint of that step holds.

    Where a reset went back to an earlier step, those are that step's weights.
    """
    scores = {int(step): float(score["all"]["mean"]) for step, score in validations.items()}
    for reset in resets:
        if (back_to := reset.get("rolled_back_to")) is not None:
            scores[reset["step"]] = scores[back_to]
    return scores


def standard_errors(scores: Mapping[str, Any] | None) -> dict[str, float]:
    """Of a validation as the journal has it, by name."""
    return {name: float(score["se"]) for name, score in scores["tasks"].items()} if scores else {}
