"""`prorl report RUN...`: write the report, or serve it while a run continues."""

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.files import write_text

_log = logging.getLogger(__name__)

SAMPLES = 400


def add_parser(commands: Any) -> None:
    """Add `report` to the main command line."""
    text = "write one HTML file with a run, a chain of stages, or several of them side by side; needs no network; print"
    text += " the diary of a chain"
    parser = commands.add_parser("report", help=text, description=text)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="run directory, or folder of a chain or of a fork")
    where = "file to write; default: report.html in the run directory, for several runs in this folder"
    add("--out", metavar="FILE", type=Path, help=where)
    add(
        "--evaluation",
        metavar="DIR",
        nargs="+",
        type=Path,
        default=[],
        help="evaluations to show: folders that prorl evaluate wrote",
    )
    many = f"responses in the sample browser; -1: all that fit; 0: none; default: {SAMPLES}"
    add("--samples", metavar="N", type=int, default=SAMPLES, help=many)
    add(
        "--step",
        metavar="K",
        type=int,
        help="write the groups of a stored step instead, token by token; default of --out: step-K.html in RUN",
    )
    add("--draw", metavar="D", nargs="+", type=int, default=[], help="groups of --step to show; default: the first")
    add(
        "--serve",
        action="store_true",
        help="serve the page on this machine instead, with new data while a run continues",
    )
    add("--port", metavar="P", type=int, help="port of --serve; 0: any free port; default: 8642")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path, or serve it, as the arguments say; return the exit code.

    Raises ConfigError for wrong arguments before anything is written or served.
    """
    if args.samples < -1:
        raise ConfigError(f"--samples {args.samples}: expected -1 (all), 0 (none) or more")
    if args.step is not None:
        return _step(args)
    if args.draw:
        raise ConfigError(f"--draw {args.draw[0]}: expected together with --step K")
    if args.serve:
        if args.out is not None:
            raise ConfigError("--out and --serve: expected one of them; --out writes a file, --serve serves the page")
        from nemo_prorl.report.serve import serve

        return serve(args.runs, args.evaluation, args.samples, 8642 if args.port is None else args.port)
    if args.port is not None:
        raise ConfigError(f"--port {args.port}: expected together with --serve")
    written = write(args.runs, args.evaluation, args.samples, args.out)
    from nemo_prorl.report.diary import diary_text
    from nemo_prorl.report.read import read_curves

    for curve in read_curves(args.runs):
        sys.stdout.write(diary_text(curve))
    sys.stdout.write(f"{written}\n")
    return 0


def _step(args: argparse.Namespace) -> int:
    """Write the page of a step and print its path."""
    from nemo_prorl.report.step_groups import write_step

    if len(args.runs) > 1 or args.evaluation or args.serve:
        raise ConfigError(f"--step {args.step}: expected one run directory, without --evaluation and --serve")
    out = args.out or args.runs[0] / f"step-{args.step}.html"
    with _written(out):
        write_step(out, args.runs[0], args.step, args.draw, args.samples)
    sys.stdout.write(f"{out}\n")
    return 0


def write(runs: list[Path], evaluations: list[Path], samples: int, out: Path | None) -> Path:
    """Write the page atomically and return its path."""
    from nemo_prorl.report.data import page_data
    from nemo_prorl.report.page import page

    data = page_data(runs, evaluations, samples)
    if out is None:
        out = (runs[0] if len(runs) == 1 else Path()) / "report.html"
    with _written(out):
        write_text(out, page(data))
    _log.info("wrote the report %s (%.1f MB)", out, out.stat().st_size / 1e6)
    return out


@contextmanager
def _written(out: Path) -> Iterator[None]:
    """Check the file to write, and name it if the block cannot write it."""
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name the file to write, such as {out / 'report.html'}")
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(
            f"--out {out}: cannot be written: {error.strerror}; give a path in a folder of yours"
        ) from error
