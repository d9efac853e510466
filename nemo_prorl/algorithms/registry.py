"""Functions that a configuration chooses by name.  No torch is imported here.

Those that come with the project are in `objectives` (losses), `advantages` and `reset_rules`.  Those of the user are
named FILE.py:FUNCTION or MODULE:FUNCTION, and imported by `own_functions`.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from nemo_prorl.errors import ConfigError
from nemo_prorl.own_functions import function_at, is_place

F = TypeVar("F", bound=Callable[..., object])


class NamedFunctions(Generic[F]):
    """The functions that a key may name: those registered here, and functions of the user by their place.

    Args:
        key: configuration key, for errors.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._functions: dict[str, F] = {}

    def register(self, function: F) -> F:
        """Register a function under its own name; a decorator."""
        self._functions[function.__name__] = function
        return function

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._functions)

    def check_shape(self, name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
        """Raise ConfigError if the function `name` returned a tensor of another shape than expected."""
        if tuple(shape) != tuple(expected):
            raise ConfigError(f"{self._key}={name}: expected a tensor of shape {tuple(expected)}; got {tuple(shape)}")

    def __getitem__(self, name: str) -> F:
        """Return the function with this name, or at this place (FILE.py:FUNCTION, MODULE:FUNCTION).

        Raises ConfigError if there is none; the message lists the names.
        """
        if name in self._functions:
            return self._functions[name]
        if is_place(name):
            return function_at(name, self._key)  # type: ignore[return-value]
        raise ConfigError(
            f"{self._key}={name}: expected {', '.join(self.names)}, or a function of your own as FILE.py:FUNCTION or"
            " MODULE:FUNCTION"
        )
