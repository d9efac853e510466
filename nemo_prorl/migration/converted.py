"""The result of a conversion."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAME, NO_EFFECT = "the same here", "without an effect there"  # why a setting needs no override


@dataclass
class Converted:
    """The result of a conversion.

    Attributes:
        rest: {key of the other trainer: value} of the settings that are not converted yet.
        overrides: {key of this project: value}.
        unknown: {key of this project: why the user must set it}.
        differs: sentences about what is not the same here.
        notes: sentences about what else the user must look at.
        unused: {key of the other trainer: why it needs no override}.
        misspelt: {key that the other trainer does not know: the key that may be meant}.
        left: {key of the other trainer: value} of the settings without a counterpart.
        given: keys that the file has; the others in `rest` are defaults.
        drawn: prompts of the data that the other trainer takes for a step; None: `prompts_per_step`.
        most: what limits the prompts of the data, as KEY=VALUE; None if nothing does.
        entry: the program that a script starts, such as `verl.trainer.main_ppo`; empty if it is not known.
        divisor: name and number of tokens that the other trainer divides a response's loss by, where the context
            divides it here; empty: as here.
        usual: {key of the other trainer: its default}.
    """

    rest: dict[str, Any]
    overrides: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)
    misspelt: dict[str, str] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    drawn: float | None = None
    most: str | None = None
    entry: str = ""
    divisor: tuple[str, Any] = ("", None)
    usual: Mapping[str, Any] = field(default_factory=dict)

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a setting of the other trainer, and remove the setting from `rest`."""
        return self.rest.pop(key, default)

    def choose(
        self, ours: str, key: str, value: Any, known: Mapping[str, str], nearest: str, is_near: bool = False
    ) -> None:
        """Set `ours` to this project's name for the method `value` of the other trainer.

        Args:
            nearest: value for a method without a name here.  The user must set it unless `is_near`; rules read it.
        """
        if ours in self.unknown:
            return
        self.overrides[ours] = known.get(str(value), nearest)
        if str(value) not in known:
            text = f"{key}={value} has no counterpart"
            if is_near:
                self.differs.append(f"{text}; {ours}={nearest} is set in its place")
            else:
                self.unknown[ours] = f"{text} here; {nearest} is what comes nearest"

    def tell_unused(self, keys: Mapping[str, Any], reason: str) -> None:
        """Tell which of these settings, {key: value}, the file has without an effect; 0 and defaults count alone."""
        present = {key: value for key, value in keys.items() if key in self.given}
        changed = [f"{key}={value}" for key, value in present.items() if not self._is_idle(key, value)]
        self.unused |= dict.fromkeys((key for key, value in present.items() if self._is_idle(key, value)), NO_EFFECT)
        if changed:
            self.notes.append(f"{', '.join(changed)} has no effect there, {reason}")

    def _is_idle(self, key: str, value: Any) -> bool:
        usual = self.usual.get(key)
        is_zero = value in (None, 0, -1, "") and (value is not False or self.usual.get(key, False) is False)
        return is_zero or value == usual or str(value) == str(usual)
