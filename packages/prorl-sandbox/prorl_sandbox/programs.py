"""What a sandbox runs, what it returns, and its errors."""

from dataclasses import dataclass


class SandboxFailure(RuntimeError):
    """The sandbox itself failed, not the program in it; or the machine is too busy for a verdict."""


class NoSandbox(RuntimeError):
    """No level of the sandbox works on this machine.  The message names what each level lacks, and a fix."""


@dataclass(frozen=True)
class Program:
    """Code written by the model, with its inputs.  Must not contain expected outputs: the code could read them.

    The meaning of an input and of its output depends on `style`:
        "stdin": the input is the text of standard input; the output is the bytes that the program printed.
        "call": the input is a JSON array of arguments for `function`; the output is the result as JSON.  If the program
            defines a class `Solution` with a method named `function`, the method of a new `Solution()` is called.
        "assert": the input is a Python statement that is executed after the program; the output is empty.
    """

    source: str
    style: str
    inputs: tuple[str, ...]
    function: str = ""  # for style "call"
    setup: str = ""  # Python code that is executed before `source`
    time_limit_s: float = 5.0  # for all inputs together, computing or asleep; waiting for a busy CPU does not count
    memory_mb: int = 2048
    output_mb: int = 1  # for each input


@dataclass(frozen=True)
class ProgramRun:
    """The outputs of a program, one for each input."""

    outputs: tuple[bytes | None, ...]  # None: the program failed on this input
    details: tuple[str, ...]  # reason of the failure; empty where the program ended well
    over_time: bool = False  # all inputs together took longer than the time limit, by the program's own doing
    refused: str = ""  # error of the compiler; empty if the program compiles
