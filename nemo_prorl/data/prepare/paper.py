"""`prorl data prepare paper`: every folder of data=prorl and of the benchmarks of the set `paper`, in one command."""

import argparse
import logging
import math
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_prorl.data import hub
from nemo_prorl.data.prepare import preparation
from nemo_prorl.data.prepare.finished import Parser, command_of, finished
from nemo_prorl.data.prepare.inputs import HUB, PrepareOptions
from nemo_prorl.data.prepare.manifest import PreparedManifest
from nemo_prorl.data.prepare.sources import ALL, Source, source_of
from nemo_prorl.data.prepared import JUDGE, PAPER
from nemo_prorl.errors import ConfigError, ProrlError, UnfitMachine

_log = logging.getLogger(__name__)

_HEAD = ("folder", "source", "state", "read", "kept", "train", "validation", "seconds", "dropped")
_OF_ONE_SOURCE = (
    "name",
    "size",
    "holdout",
    "field",
    "task",
    "keep",
    "licence",
    "revision",
    "since",
    "until",
    "estimate",
)


@dataclass
class PaperFolder:
    """A folder to make: the words of its command, and the result.

    `state`: made, as before (the folder was finished) or missing.  `fault`: why the folder is missing.
    """

    folder: str
    words: list[str]
    state: str = "missing"
    manifest: PreparedManifest | None = None
    seconds: float = 0.0
    fault: ProrlError | None = None

    @property
    def source(self) -> Source:
        return source_of(self.words[0])


Options = Callable[[argparse.Namespace], PrepareOptions]


class Paper:
    """The steps of `prorl data prepare paper`, benchmarks first: training prompts are compared with them.

    Args:
        arguments: the options of the command; each step takes those that its own words do not set.
        parser: the parser of `prorl data prepare`.
        options: converts a step's arguments; raises ConfigError.
    """

    def __init__(self, arguments: argparse.Namespace, parser: Parser, options: Options) -> None:
        for option in _OF_ONE_SOURCE:
            if getattr(arguments, option) != parser.get_default(option):
                raise ConfigError(
                    f"--{option}: belongs to one source, and `paper` makes {len(PAPER)}.  Fix: prepare that source by"
                    " itself; --scale X changes the sizes of all"
                )
        if arguments.only and arguments.only not in PAPER:
            raise ConfigError(f"--only {arguments.only}: no folder of the paper's data; known: {', '.join(PAPER)}")
        self._arguments, self._parser, self._options = arguments, parser, options
        self._out: Path = arguments.out
        self.steps = [
            PaperFolder(folder, self._words(folder, shlex.split(command.removesuffix(JUDGE))))
            for folder, command in PAPER.items()
            if arguments.only in ("", folder)
        ]

    def _words(self, folder: str, words: list[str]) -> list[str]:
        """Return the words of a folder's command with --from, --out and the sizes of this run."""
        arguments, source = self._arguments, source_of(words[0])
        if "--from" in words and arguments.origin not in (None, HUB):
            words[words.index("--from") + 1] = str(Path(arguments.origin) / source.name)
        if arguments.scale != 1:
            own = self._parser.parse_args([*words, "--out", "x"])
            sizes = {
                "--size": source.size if own.size is None else own.size,
                "--holdout": source.holdout if own.holdout is None else own.holdout,
            }
            for option, size in sizes.items():
                if size in (None, 0, ALL):
                    continue
                scaled = [option, str(math.ceil(size * arguments.scale))]
                at = words.index(option) if option in words else len(words)
                words[at : at + 2] = scaled
        return [*words, "--out", str(self._out / folder)]

    def run(self) -> None:
        """Make each folder that is not finished; go on to the next one if a folder cannot be made."""
        for number, step in enumerate(self.steps, 1):
            _log.info("%d of %d: %s", number, len(self.steps), step.folder)
            started = time.monotonic()
            try:
                self._make(step)
            except ProrlError as error:
                step.fault = error
                _log.warning("%s: %s", step.folder, error)
            step.seconds = time.monotonic() - started

    def _make(self, step: PaperFolder) -> None:
        against = [word for file in self._benchmarks(step) for word in ("--against", str(file))]
        arguments = argparse.Namespace(**{**vars(self._arguments), "only": "", "origin": None})
        arguments.against = list(arguments.against)
        arguments = self._parser.parse_args([*step.words, *against], arguments)
        self._check_origin(step, arguments.origin)
        options = replace(self._options(arguments), goes_on=self._goes_on("FOLDER"))
        command = command_of(self._parser, arguments)
        if (manifest := finished(self._parser, options, command)) is not None:
            step.manifest, step.state = manifest, "as before"
            return
        step.manifest, step.state = preparation.prepare(options, command), "made"

    def _benchmarks(self, step: PaperFolder) -> list[Path]:
        """Return the benchmarks' files to compare a training source with; none for a benchmark and for puzzles.

        Generated puzzles are left out on both sides: held-out puzzles have other seeds, and none is in both parts.
        """
        if step.source.holdout == ALL or step.source.size is not None:
            return []
        names = [name for name, command in PAPER.items() if source_of(command.split()[0]).holdout == ALL]
        files = [self._out / name / f"validation.{self._arguments.form}" for name in names]
        if absent := [file.parent.name for file in files if not file.is_file()]:
            _log.warning(
                "%s is not compared with %s: not prepared.  The same command makes %s again once they are",
                *(step.folder, ", ".join(absent), step.folder),
            )
        return [file for file in files if file.is_file()]

    def _check_origin(self, step: PaperFolder, origin: str | None) -> None:
        if origin in (None, HUB) or Path(str(origin)).exists():
            return
        source, goes_on = step.source, self._goes_on(self._arguments.origin)
        fix = "it is not on the hub"
        if source.repo:
            by_hand = hub.by_hand(source.repo, source.files, source.revision or None, str(origin))
            fix = f"on a machine with network access run `{by_hand}`, and continue with `{goes_on}`"
        raise UnfitMachine(
            f"--from {origin}: no such folder; expected the files of {source.name} as published. Fix: {fix}"
        )

    def _goes_on(self, folder: str) -> str:
        return f"prorl data prepare paper --from {shlex.quote(folder)} --out {shlex.quote(str(self._out))}"

    def exit_code(self) -> int:
        """Return 0 if every folder exists, otherwise the highest exit code of a fault: 4, bad data, before 3 and 2."""
        return max((step.fault.exit_code for step in self.steps if step.fault is not None), default=0)

    def table(self) -> str:
        """Return the table of all folders, and below it what is missing with its reason."""
        rows: list[tuple[str, ...]] = [_HEAD]
        for step in self.steps:
            counts: dict[str, Any] = dict(step.manifest["counts"]) if step.manifest else {}
            dropped = ", ".join(f"{number} {reason}" for reason, number in counts.get("dropped", {}).items())
            numbers = [f"{counts[key]:,}" if key in counts else "" for key in _HEAD[3:7]]
            rows.append((step.folder, step.source.name, step.state, *numbers, f"{step.seconds:.0f}", dropped))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        form = "  ".join(
            f"{{:{'>' if name in _HEAD[3:8] else '<'}{width}}}" for name, width in zip(_HEAD, widths, strict=True)
        )
        lines = [form.format(*row).rstrip() for row in rows]
        missing: dict[str, list[PaperFolder]] = {}
        for step in self.steps:
            if step.fault is not None:
                missing.setdefault(str(step.fault), []).append(step)
        if missing:
            lines += ["", f"{sum(map(len, missing.values()))} of {len(self.steps)} folders are missing:"]
        for fault, steps in missing.items():
            lines.append(f"{', '.join(step.folder for step in steps)}: {fault}")
            lines += [f"  alone: prorl data prepare {shlex.join(step.words)}" for step in steps]
        return "\n".join(lines) + "\n"
