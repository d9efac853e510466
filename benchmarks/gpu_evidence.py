"""Measures the project on real hardware: writes each section's results, or why it was skipped, as JSON and Markdown.

python benchmarks/gpu_evidence.py                          on a GPU, about 40 minutes (`make gpu-evidence`)
python benchmarks/gpu_evidence.py --device cpu --small     a test of the sections with tiny sizes
... --wheels DIR            first installs the wheels in DIR into a temporary folder, without network
... --sections kernels,actor

A section whose packages are not installed is skipped.  A GPU needs torch, and numpy or its wheel.  The project need not
be installed.  Each section is a separate process with a time limit, so that a failed or hung section does not affect
the others.  Writes after each section.

The page ends each run with a verdict on each gate (gpu/gates.py).  Exit status: 1 if a section failed or, on a GPU, a
gate was missed.
"""

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.gates import MISSED, verdicts
from gpu.page import page
from machine import describe

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = 10  # exit status of gpu/section.py
LAST_LINES = 12
CPU_PATIENCE = 4  # factor on a section's time limit on a CPU, whose cores may be busy
# Section: time limit in seconds, and heading.
SECTIONS = {  # ordered by the risk to a first run
    "actor": (300, "The actor in bf16: log-probabilities, updates, hard reset, checkpoint"),
    "resume": (300, "A training that goes on from a checkpoint"),
    "fp8": (300, "FP8: a pass without gradients, then an update"),
    "engine": (260, "vLLM beside a resident trainer: start, sleep, wake, publication"),
    "wakes": (240, "Twenty sleeps and wakes of an engine"),
    "gap": (240, "How far engine and trainer are apart"),
    "steps": (900, "Eight whole steps of a run"),
    "repeat": (560, "The same run twice"),
    "widths": (300, "The price of a new shape of micro-batches"),
    "kernels": (120, "Log-probabilities and loss"),
    "ceilings": (40, "What this machine can do at most"),
    "publication": (60, "Publication of the weights"),
    "mcore": (140, "Megatron-Core's model without NeMo-Aligner"),
}


def packages() -> dict[str, str | None]:
    """Return the versions of the packages that decide which sections can run; None for an absent package."""
    from importlib import metadata

    names = ("torch", "triton", "megatron-core", "nemo-toolkit", "nemo-aligner", "transformer-engine", "apex", "vllm")
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def has_gpu() -> bool:
    """Return whether this Python has a torch that finds a GPU."""
    return find_spec("torch") is not None and bool(importlib.import_module("torch").cuda.is_available())


def facts(device: str) -> dict[str, Any]:
    """Return a description of the machine: host, packages, device and GPU."""
    found: dict[str, Any] = {"host": describe(), "packages": packages(), "device": device, "gpu": None}
    if device == "cuda":
        import torch

        whole = torch.cuda.get_device_properties(0)
        found["gpu"] = {"name": whole.name, "memory_bytes": whole.total_memory, "cuda": torch.version.cuda}
    return found


def install(wheels: Path, target: Path) -> str | None:
    """Unpack the wheels into `target`; return an error message, or None.  Keeps an installed numpy: it fits torch."""
    there = {"numpy"} if find_spec("numpy") else set()
    files = sorted(str(file) for file in wheels.glob("*.whl") if file.name.split("-")[0] not in there)
    if not files:
        return f"{wheels} holds no *.whl; `make gpu-wheels` collects them"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(target), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip()[-500:]


def run_section(name: str, settings: dict[str, Any], folder: Path, seconds: float) -> dict[str, Any]:
    """Run one section; return its state (done, skipped, failed, timed out), rows, seconds and last lines of output."""
    rows, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    rows.touch()
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "section.py"), name, str(rows), json.dumps(settings)]
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # kills children of the section, too; also after an interrupt
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    state = {0: "done", SKIPPED: "skipped", None: "timed out"}.get(status, "failed")
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    section = {"state": state, "seconds": round(time.monotonic() - began, 1), "limit_s": seconds, "rows": found}
    if state == "skipped":
        section |= {"rows": found[:-1], "reason": found[-1]["reason"]}
    elif state != "done":
        section["last_lines"] = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        section["status"] = status
    return section


def write(result: dict[str, Any], base: Path) -> None:
    """Write BASE.json and BASE.md, each atomically."""
    for suffix, text in ((".json", json.dumps(result, indent=1) + "\n"), (".md", page(result))):
        temporary = base.with_name(f"{base.name}{suffix}.tmp")
        temporary.write_text(text)
        temporary.replace(base.with_name(base.name + suffix))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--small", action="store_true", help="tiny sizes in float32, only to test this program")
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), help="sections to run, comma-separated; default: %(default)s"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, without network; default: none")
    parser.add_argument("--engine-python", help="Python with vLLM; default: .venv/rollout's, otherwise this one")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit", help="commit to write into the results, for a copy without git; default: none")
    parser.add_argument(
        "--name", help="machine name for the names of the output files; default: name of the GPU, or cpu"
    )
    args = parser.parse_args()
    args.sections = args.sections.split(",")
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"--sections {unknown[0]}: no such section; known: {', '.join(SECTIONS)}")
    return args


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="gpu-evidence-") as temporary:
        folder = Path(temporary)
        paths, fault = [str(ROOT), str(ROOT / "benchmarks")], None
        if args.wheels is not None:
            fault = install(args.wheels, folder / "site")
            paths.append(str(folder / "site"))
            sys.path.append(str(folder / "site"))
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        return prove(args, folder, fault)


def prove(args: argparse.Namespace, folder: Path, fault: str | None) -> int:
    """Run the chosen sections; return 0, 1, or 3 if --device cuda finds no GPU.

    1: a section failed or timed out or, on a GPU, a gate was missed.

    Args:
        fault: error message of the installation of --wheels; None: no error, or no wheels.
    """
    device = args.device if args.device != "auto" else "cuda" if has_gpu() else "cpu"
    if device == "cuda" and not has_gpu():
        sys.stderr.write("--device cuda: torch finds no GPU here; --device cpu --small shows what runs without one\n")
        return 3
    small = args.small or device == "cpu"  # real sizes take hours on a CPU
    rollout = ROOT / ".venv" / "rollout" / "bin" / "python"
    engine_python = args.engine_python or (str(rollout) if os.access(rollout, os.X_OK) else None)
    settings = {"device": device, "small": small, "engine_python": engine_python}
    began = datetime.now(UTC)
    result: dict[str, Any] = {
        "date": f"{began:%Y-%m-%d %H:%M} UTC",
        "machine": facts(device),
        "small": small,
        "commit": args.commit,
        "wheels": None if args.wheels is None else fault or "installed",
        "sections": {},
        "gates": [],
    }
    name = args.name or (result["machine"]["gpu"] or {"name": "cpu"})["name"].replace(" ", "-")
    args.out.mkdir(parents=True, exist_ok=True)
    base = args.out / f"gpu-evidence-{began:%Y-%m-%d}-{name}{'-small' if small else ''}"
    for section in args.sections:
        seconds, title = SECTIONS[section]
        seconds *= 1 if device == "cuda" else CPU_PATIENCE
        sys.stderr.write(f"{section} ... ")
        sys.stderr.flush()
        result["sections"][section] = {"title": title} | run_section(section, settings, folder, seconds)
        result["gates"] = verdicts(result["sections"], small)
        write(result, base)
        done = result["sections"][section]
        sys.stderr.write(f"{done['state']}, {done['seconds']} s{'; ' + done['reason'] if 'reason' in done else ''}\n")
    sys.stdout.write(f"{base}.json\n{base}.md\n")
    return status_of(result)


def status_of(result: dict[str, Any]) -> int:
    """Return 1 if a section failed or timed out or, on a GPU, a gate was missed; otherwise 0."""
    failed = any(section["state"] not in ("done", "skipped") for section in result["sections"].values())
    missed = any(row["verdict"] == MISSED for row in result["gates"])
    return int(failed or (missed and result["machine"]["device"] == "cuda"))


if __name__ == "__main__":
    sys.exit(main())
