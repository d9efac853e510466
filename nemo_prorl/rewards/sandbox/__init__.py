"""Runs code that a model wrote, so that it can neither harm the machine nor fake its score.  Standard library only.

A process of its own (`zygote.py`) confines itself once and forks a child for each run.  What a program gets:

* no file of the host but Python's standard library and shared libraries, read-only; a folder of its own, emptied after;
* no network, no other process to see, signal, trace or start; no program to execute; no environment, no arguments;
* bounds on time, memory, threads, files, descriptors and output; a kill that nothing survives.

Expected outputs never enter it: outputs come back as bytes in memory files and are compared outside.

Levels: "full" (namespaces, Landlock, seccomp) and "reduced" (what is left of these where the host forbids some; the
report says what it lacks).  A level is used only after a program under it has attempted every escape (`escapes.py`) and
failed.  Without any, code is refused (docs/explanation/sandbox.md says what the option `unsafe_no_sandbox` does).

What it does not stop: a bug in the kernel; measuring time; using its share of CPU, memory and disk to the bounds; at
level "reduced" also asking for names, sizes and times of files of the host (stat).
"""
