"""Evaluates every benchmark whose problems are on this machine three times: undisturbed, killed half-way, repeated.

    .venv/train/bin/python benchmarks/evaluate_all.py runs/laptop/base --sources FOLDER [--samples 4] [--out DIR]

FOLDER holds the published files that PUBLISHED below lists; the output names the benchmarks whose file is absent.  The
problems are prepared by the command in each benchmark's field `prepare`; generated problems need no file.  Then `prorl
evaluate` runs three times: (whole) undisturbed; (broken) ended by SIGKILL when half of the responses are stored, and
run again; (again) repeated in a new folder from the manifest of (whole).  All numbers must be equal, and no response
stored before the kill is drawn again.
A laptop's model cannot solve competition problems: few, short responses test the machinery, not the model.
"""

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe

from nemo_prorl.evaluation.catalogue import Benchmark, catalogue
from nemo_prorl.evaluation.run import differences

PRORL = str(Path(sys.executable).with_name("prorl"))
PUBLISHED = {
    "aime24": "math/aime24.jsonl",
    "aime25": "math/aime25.jsonl",
    "amc": "math/amc_2022_2023.jsonl",
    "apps": "code/apps_coderl_samples.jsonl",
    "codecontests": "code/codecontests_test_stdin.jsonl",
    "codeforces": "code/codeforces_stdin.jsonl",
    "gpqa_diamond": "stem/gpqa_diamond.csv",
    "gsm8k": "math/gsm8k_test.jsonl",
    "humanevalplus": "code/humanevalplus_mini.jsonl",
    "ifeval": "ifeval/input_data.jsonl",
    "livecodebench": "code/livecodebench.jsonl",
    "math500": "math/math500.jsonl",
    "minerva": "math/minerva_math.jsonl",
    "olympiadbench": "math/olympiadbench_oe_to_en.jsonl",
    "taco": "code/taco.jsonl",
}
PUZZLES = ("--size", "0", "--holdout", "960")  # ten of each task instead of a hundred: made in seconds
DEADLINE_S = 3600.0


def prepare(sources: Path, data: Path) -> tuple[list[Benchmark], list[str]]:
    """Prepare problems in `data`; return the benchmarks that have problems, and the names of all others."""
    found, absent = [], []
    for one in catalogue().values():
        file = sources / PUBLISHED.get(one.name, "")
        if one.prompts is not None and "FILE" in one.prepare and not file.is_file():
            absent.append(one.name)
            continue
        if one.prompts is not None and not (data / one.prompts / "manifest.json").is_file():
            words = shlex.split(one.prepare.replace("DIR/", f"{data}/"))
            command = [PRORL, *(str(file) if word == "FILE" else word for word in words[1:]), "--check", "0"]
            command += [] if "FILE" in one.prepare else PUZZLES
            finished = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
            if finished.returncode:
                raise SystemExit(f"{shlex.join(command)} ended with {finished.returncode}:\n{finished.stderr}")
        found.append(one)
    return found, absent


@dataclass
class Evaluation:
    """An evaluation: the folder that `prorl evaluate` writes, and the arguments of the command."""

    folder: Path
    words: list[str]

    def files(self) -> dict[str, bytes]:
        """Return the stored responses as JSON Lines by file name, without an incomplete last line."""
        found = {path.name: path.read_bytes() for path in (self.folder / "samples").glob("*.jsonl")}
        return {name: data[: data.rfind(b"\n") + 1] for name, data in found.items()}

    def stored(self) -> int:
        return sum(data.count(b"\n") for data in self.files().values())

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "results.json").read_text())
        return found

    @contextmanager
    def started(self) -> Iterator["subprocess.Popen[str]"]:
        command = [PRORL, "evaluate", *self.words, "--out", str(self.folder)]
        log = self.folder.with_suffix(".log").open("a")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            log.close()

    def done(self) -> tuple[float, str]:
        """Run the evaluation to its end and return its seconds and its output.  Raises SystemExit if it fails."""
        began = time.monotonic()
        with self.started() as process:
            out, _ = process.communicate(timeout=DEADLINE_S)
        if process.returncode:
            raise SystemExit(
                f"{self.folder}: failed with exit code {process.returncode}; see {self.folder.with_suffix('.log')}"
            )
        return time.monotonic() - began, out

    def killed_at(self, responses: int) -> int:
        """Run the evaluation, kill it once `responses` responses are stored; return the number stored at its end."""
        end = time.monotonic() + DEADLINE_S
        with self.started() as process:
            while self.stored() < responses:
                if process.poll() is not None or time.monotonic() > end:
                    log = self.folder.with_suffix(".log")
                    raise SystemExit(
                        f"{self.folder}: ended before {responses} responses, or took {DEADLINE_S:g} s; see {log}"
                    )
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            process.wait()
        return self.stored()


def by_domain(results: dict[str, Any], benchmarks: list[Benchmark]) -> list[str]:
    lines = [f"{'domain':14s} {'benchmarks':>10s} {'prompts':>8s} {'responses':>10s}"]
    for domain in sorted({one.domain for one in benchmarks}):
        entries = [results["benchmarks"][one.name] for one in benchmarks if one.domain == domain]
        prompts = sum(entry["prompts"] for entry in entries)
        responses = sum(entry["prompts"] * entry["samples"] for entry in entries)
        lines.append(f"{domain:14s} {len(entries):10d} {prompts:8d} {responses:10d}")
    return lines


def kept(before: dict[str, bytes], after: dict[str, bytes]) -> bool:
    """Return whether each file of `before` has only grown in `after`, and `after` has no response twice."""
    if not all(after.get(name, b"").startswith(data) for name, data in before.items()):
        return False
    for data in after.values():
        keys = [(line["id"], line["sample"]) for line in map(json.loads, data.splitlines())]
        if len(keys) != len(set(keys)):
            return False
    return True


def compare(
    folder: Path, words: list[str], benchmarks: list[Benchmark], overrides: list[str]
) -> tuple[list[str], bool]:
    """Run the three evaluations; return the lines of the report, and whether all comparisons are equal."""
    whole, broken = Evaluation(folder / "whole", words), Evaluation(folder / "broken", words)
    again = Evaluation(folder / "again", ["--manifest", str(folder / "whole" / "manifest.json"), *overrides])
    seconds, _ = whole.done()
    results, total = whole.results(), whole.stored()
    clock = results["time"]
    lines = by_domain(results, benchmarks)
    lines.append(
        f"whole:  {seconds:6.1f} s, {clock['seconds']:.1f} s of them drawing {total} responses"
        f" ({clock['generated_tokens']} tokens, {clock['tokens_per_s']:.0f} tokens/s, judging included)"
    )
    there = broken.killed_at(total // 2)
    before = broken.files()
    seconds, _ = broken.done()
    unequal = differences(results, broken.results())
    same = kept(before, broken.files()) and broken.stored() == total
    lines.append(
        f"broken: {seconds:6.1f} s after a SIGKILL with {there} of {total} responses stored;"
        f" {'none of them drawn again' if same else 'NOT ALL KEPT'}; {len(unequal)} numbers differ from whole"
    )
    seconds, out = again.done()
    equal = out.splitlines()[-1].startswith("equal to")
    lines.append(f"again:  {seconds:6.1f} s by whole's manifest; {'all numbers are equal' if equal else 'UNEQUAL'}")
    return lines, same and equal and not unequal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder, checkpoint or run directory")
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="KEY=VALUE for prorl evaluate")
    parser.add_argument("--sources", metavar="FOLDER", type=Path, required=True, help="folder of the published files")
    parser.add_argument("--samples", type=int, default=4, help="responses per prompt (16 in the paper); default: 4")
    parser.add_argument("--max-response", type=int, default=16, help="maximum tokens per response; default: 16")
    parser.add_argument("--limit", type=int, help="first N prompts of each benchmark; default: all")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/evaluate_all"))
    args = parser.parse_args()
    began = time.monotonic()
    benchmarks, absent = prepare(args.sources, args.out / "data")
    lines = [describe(), f"{len(benchmarks)} benchmarks, ready after {time.monotonic() - began:.0f} s"]
    lines += [f"not here: {', '.join(absent)}"] if absent else []
    for name in ("whole", "broken", "again"):
        shutil.rmtree(args.out / name, ignore_errors=True)
    words = [args.model, "--benchmarks", ",".join(one.name for one in benchmarks), "--data", str(args.out / "data")]
    # The laptop's tokenizer has few words, which makes prompts long: use the whole context of the model.
    words += [
        *args.overrides,
        "--samples",
        str(args.samples),
        "--context",
        "32768",
        "--max-response",
        str(args.max_response),
    ]
    words += [] if args.limit is None else ["--limit", str(args.limit)]
    outcome, fine = compare(args.out, words, benchmarks, args.overrides)
    sys.stdout.write("\n".join([*lines, *outcome]) + "\n")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
