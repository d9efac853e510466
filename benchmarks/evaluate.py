"""Tokens/s of an evaluation, with judging and storing, compared with vLLM's own offline throughput on the same prompts.

    .venv/train/bin/python benchmarks/evaluate.py runs/laptop/base [--prompts 500] [--samples 16] [--repeats 7]

MODEL is a Hugging Face folder.  Three ways alternate, each with its own engine, which idles while the others work:
(a) `prorl evaluate`, which draws each response with its own seed, judges it and stores it; (b) vLLM offline with its
own settings, all samples of a prompt in one request without seeds; (c) vLLM offline with this project's engine settings
and a seed for each response, without which an evaluation cannot be repeated.
The prompts are the laptop job's held-out problems.  Start-up is not measured.  The responses of a trained model have
about six tokens, so that costs outside the model weigh most.  To measure longer responses, give RUN/init, a run's
model with random weights, as MODEL, and --max-response 100.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import describe

from nemo_prorl.deadlines import Deadline
from nemo_prorl.evaluation import models
from nemo_prorl.evaluation.catalogue import Benchmark, choose, load_records
from nemo_prorl.evaluation.run import EvaluationOptions, configuration, local_engines
from nemo_prorl.evaluation.sampling import BenchmarkWork, Work, missing_work
from nemo_prorl.evaluation.services import Services
from nemo_prorl.evaluation.sources import LocalEngines
from nemo_prorl.evaluation.store import Store
from nemo_prorl.rewards.interface import Verdict
from nemo_prorl.service import read_token

WAYS = {"prorl evaluate": "", "vLLM offline": "default", "vLLM offline, our settings": "ours"}
_BAR = 0.9


class Ours:
    """An evaluation by `prorl evaluate` that can be repeated: model, configuration, engines and records."""

    def __init__(self, options: EvaluationOptions, prompts: int) -> None:
        self.folder, self.benchmarks = options.out, options.benchmarks
        model = models.open_model(Path(options.model), options.out, "newest")
        assert model.folder is not None
        self.model, self.cfg = model, configuration(options, model.folder)
        self.cfg.trainer.grpo.context_tokens = max(one.sampling.context for one in self.benchmarks)
        self.source: LocalEngines = local_engines(self.cfg, model.folder)
        self.records = _first({one.name: load_records(one, None) for one in self.benchmarks}, prompts)

    async def once(self, services: Services, number: int) -> tuple[float, int]:
        """Draw, judge and store all responses, with `number` as the run's seed; return seconds and generated tokens."""
        stores = {one.name: Store(self.folder / f"run-{number}", one.name) for one in self.benchmarks}
        async with services.reward_client() as rewards:

            async def judge(request: dict[str, Any]) -> Verdict:
                return await rewards.score(request, Deadline(600.0, "a verdict"))

            what = [BenchmarkWork(one, stores[one.name], self.records[one.name]) for one in self.benchmarks]
            work = Work(self.source, judge, number)
            await services.watching(work.run(missing_work(what, self.source)))
        lacking = [v for store in stores.values() for v in store.verdicts.values() if v["score"] is None]
        assert not lacking, lacking[0]
        for store in stores.values():
            store.close()
        return work.seconds, work.tokens

    def offline(self) -> dict[str, Any]:
        """Return the evaluation's model, prompts and settings in the form that benchmarks/evaluate_offline.py reads."""
        rollout, prompts = self.cfg.rollout, []
        for one in self.benchmarks:
            prompts += [self.source.request(record, one.sampling) for record in self.records[one.name]]
        params = prompts[0][1]
        job = {"model": str(self.model.folder), "samples": self.benchmarks[0].sampling.samples}
        job |= {"prompts": [ids for ids, _ in prompts], "max_tokens": [p.max_tokens for _, p in prompts]}
        job |= {"temperature": params.temperature, "top_p": params.top_p, "stop": list(params.stop_token_ids or ())}
        job |= {key: rollout[key] for key in ("dtype", "threads", "eager", "max_num_seqs", "max_batched_tokens")}
        return {**job, "kv_mb": rollout.kv_cache_mb, "context": self.cfg.trainer.grpo.context_tokens}


def _first(records: dict[str, list[dict[str, Any]]], number: int) -> dict[str, list[dict[str, Any]]]:
    """Return the first records of each benchmark, `number` in all, as evenly as the benchmarks' sizes allow."""
    left, found = number, {}
    for at, (name, some) in enumerate(sorted(records.items(), key=lambda item: len(item[1]))):
        found[name] = some[: -(-left // (len(records) - at))]
        left -= len(found[name])
    return found


class Offline:
    """A process that runs vLLM offline and stays up between measurements."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM's process ended with exit code {self._process.wait()}")
        return line

    def once(self, word: str) -> tuple[float, int]:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        result = json.loads(self._line())
        return result["seconds"], result["tokens"]


@contextlib.contextmanager
def offline(python: str, folder: Path, what: dict[str, Any], settings: str) -> Iterator[Offline]:
    (folder / "offline.json").write_text(json.dumps(what))
    command = [python, str(Path(__file__).with_name("evaluate_offline.py")), str(folder / "offline.json"), settings]
    with (folder / f"offline-{settings}.log").open("w") as log:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        try:
            yield Offline(process)
        except RuntimeError:
            sys.stderr.write((folder / f"offline-{settings}.log").read_text()[-2000:])
            raise
        finally:
            process.kill()
            process.communicate()


async def measure(ours: Ours, python: str, repeats: int) -> dict[str, list[float]]:
    """Return the tokens/s of each way in each round, without a first round that warms caches."""
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    tasks = sorted({one.task for one in ours.benchmarks})
    async with Services(ours.cfg, ours.folder, tasks, 1) as services:
        ours.source.connect(services.endpoints, read_token(services.token_file), 1)
        await services.watching(services.ready())
        with contextlib.ExitStack() as stack:
            python_and_work = python, ours.folder, ours.offline()
            theirs = {word: stack.enter_context(offline(*python_and_work, word)) for word in WAYS.values() if word}
            for number in range(repeats + 1):
                for name, word in WAYS.items():
                    if word:
                        call = str(number) if word == "ours" else "none"
                        seconds, tokens = await services.watching(asyncio.to_thread(theirs[word].once, call))
                    else:
                        seconds, tokens = await ours.once(services, number)
                    sys.stderr.write(f"{number} {name}: {tokens} tokens in {seconds:.2f} s\n")
                    if number:
                        rates[name].append(tokens / seconds)
        await ours.source.close()
    return rates


def report(rates: dict[str, list[float]]) -> list[str]:
    medians = {name: statistics.median(some) for name, some in rates.items()}
    lines = [f"{'':27s} {'median':>9s} {'lowest':>9s} {'highest':>9s}   tokens/s"]
    lines += [f"{name:27s} {medians[name]:9.0f} {min(some):9.0f} {max(some):9.0f}" for name, some in rates.items()]
    name, *others = rates
    for other in others:
        share = medians[name] / medians[other]
        lines.append(f"{name} / {other}: {share:.3f} ({'within' if share >= _BAR else 'NOT within'} 10 %)")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder of the laptop's model")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-response", type=int, default=16, help="maximum tokens per response; default: 16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="KEY=VALUE of the configuration")
    args = parser.parse_args()
    changed: list[Benchmark] = []
    for one in choose("laptop"):
        context = max(one.sampling.context, 100 + args.max_response)
        sampling = {"samples": args.samples, "context": context, "max_response": args.max_response}
        changed.append(one.changed(sampling))
    with tempfile.TemporaryDirectory() as text:
        options = EvaluationOptions(args.model, tuple(changed), Path(text), overrides=tuple(args.overrides))
        ours = Ours(options, args.prompts)
        what = f"{args.samples} samples x {sum(map(len, ours.records.values()))} prompts, {args.repeats} rounds"
        rates = asyncio.run(measure(ours, str(Path(ours.cfg.rollout.python).absolute()), args.repeats))
    sys.stdout.write("\n".join([describe(), what, *report(rates)]) + "\n")


if __name__ == "__main__":
    main()
