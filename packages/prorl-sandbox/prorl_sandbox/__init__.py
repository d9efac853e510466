"""A sandbox for code that a model wrote, in which it can neither harm the machine nor fake its score.

A separate process (`zygote.py`) confines itself once and forks a child for each run.  A program in the sandbox has:

* Python's standard library and shared libraries, read-only; no other file of the host; a folder, emptied after the run;
* no network; no other process to see, signal, trace or start; no program to execute; no environment, no arguments;
* limits on time, memory, threads, files, descriptors and output; after a kill, no part of the program still runs.

Expected outputs never enter the sandbox.  A program's outputs leave it in memory files and are compared outside.

Levels: "full" (namespaces, Landlock, seccomp) and "reduced" (without namespaces, for hosts that forbid them; the report
lists what is missing).  A level is used only after a program in it has tried every escape (`escapes.py`) and failed.
If no level passes, code is refused, unless the caller says `unsafe=True`.

The sandbox does not stop: exploits of kernel bugs; measuring time; using CPU, memory and disk up to the limits; at
level "reduced", also reading names, sizes and times of the host's files (stat).
"""

from typing import TYPE_CHECKING, Any

from prorl_sandbox.programs import NoSandbox, Program, ProgramRun, SandboxFailure

if TYPE_CHECKING:
    from prorl_sandbox.client import Sandbox
    from prorl_sandbox.levels import open_sandbox

__all__ = ["NoSandbox", "Program", "ProgramRun", "Sandbox", "SandboxFailure", "open_sandbox"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import the caller's side on first use: the process of the sandbox imports this package without it."""
        if name not in ("Sandbox", "open_sandbox"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from prorl_sandbox import levels

        return getattr(levels, name)
