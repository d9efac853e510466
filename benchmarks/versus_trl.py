"""A training step of this project compared with TRL's GRPOTrainer: seconds, tokens/s, memory, and reward over time.

    python3.11 setup/environments.py --only trl                   makes .venv/trl (1.6 GB, about a minute); first
    .venv/train/bin/python benchmarks/versus_trl.py               both workloads and the learning curves (30 min)
    ... --workloads short --steps 1 --rounds 1 --learn-s 0        less
    ... --trl processes --learn-s 0 --beside ../before            also another checkout, e.g. of the commit before
    ... --model FOLDER --prorl laptop --learn-s 300               a real language model, such as SmolLM2-135M-Instruct
    ... --precision bf16                                          bf16 on both sides, where the default is float32

The same random Qwen2 of 0.9 million parameters, the same prompts (two-term chain_sum), the same rewards (our puzzles
plugin), 48 prompts x 16 responses, 4 updates per step, the same learning rate, clipping, temperature and KL, the same
cores, the same settings of malloc.  With --model, the prompts ask for texts with constraints, in the model's chat
template, 8 prompts x 8 responses.  Each side runs in several ways (--trl, --prorl), such as one process with a thread
per core or one process per core; the fastest way of each side is compared.  Blocks of steps alternate; the first step
of a block warms caches and does not count.  The time of a step is the wall time between the ends of two steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from machine import describe

from nemo_prorl.files import read_objects
from nemo_prorl.launcher.supervisor import HEAP

ROOT = Path(__file__).resolve().parent.parent
PRORL = Path(sys.executable).with_name("prorl")
TRL_PYTHON = ROOT / ".venv" / "trl" / "bin" / "python"
UPDATES, KL = 4, 1e-4
PRECISIONS: dict[str, list[str]] = {
    "32": [],
    "bf16": ["trainer.precision=bf16", "model.megatron_amp_O2=true"],
}  # prorl's overrides
TIMING_LR = 1e-6  # so small that lengths do not change


@dataclass(frozen=True)
class Workload:
    """The prompts of a comparison, and their number and lengths."""

    cap: int  # maximum tokens of a response
    steps: int  # counted steps per block: TRL takes minutes for a long one
    kv_mb: int
    prompts: int = 48
    samples: int = 16
    room: int = 32  # maximum tokens of a prompt
    plugin: str = "puzzles"  # the reward plugin, and its task
    temperature: float = 1.2
    learning_lr: float = 2e-4


WORKLOADS = {"short": Workload(64, 4, 256), "long": Workload(512, 2, 512)}
REAL = Workload(96, 4, 1000, prompts=8, samples=8, room=160, plugin="instructions", temperature=1.0, learning_lr=2e-5)
LEARN_CAP = 16  # maximum tokens of a response in the learning curves of the small model
# TRL's modes on a CPU.  Its vLLM server mode sends weights over NCCL and refuses any device but CUDA
# (trl/generation/vllm_client.py), and vLLM in its process needs a vLLM up to 0.31 for GPUs.
TRL_OPTIONS: dict[str, dict[str, Any]] = {
    "generate": {},
    "processes": {},  # generate in torchrun's data parallelism, one process with one thread per core
    "static": {"cache_implementation": "static"},
    "continuous": {"use_transformers_continuous_batching": True},
}
# Layouts of this project: as in the laptop job (one rank with a thread per core, one engine), or a rank and an engine
# per core.
PRORL_WAYS = {"laptop": "trainer.devices=1 rollout.engines=1", "cores": "trainer.devices={n} rollout.engines={n}"}
# A random model would draw each of its 320 words equally often.  To draw the stop token about once in 82 tokens after
# any text, the first component of every embedding is EMBED, no layer writes to it, and only the stop token's row of the
# output weight reads it, with factor STOP.
EMBED, STOP = 0.5, 3.7
PHASES = ("publish", "rollout", "logprobs", "advantages", "updates")


@dataclass
class Block:
    """Some steps of one side: each with seconds, tokens, reward and seconds by part; peak memory of all processes."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    peak_mb: float = 0.0
    start_s: float = 0.0  # seconds from the command to the start of the first step


class Memory(threading.Thread):
    """A thread that samples the peak memory (Pss, in MB) of a process and all its descendants.

    Samples twice a second until `rest` is called, because sampling takes time from the measured cores.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process, self.peak_mb, self._over = psutil.Process(pid), 0.0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.5):
            total = 0
            try:
                for process in [self._process, *self._process.children(recursive=True)]:
                    try:
                        total += process.memory_full_info().pss
                    except psutil.Error:
                        continue
            except psutil.Error:
                return
            self.peak_mb = max(self.peak_mb, total / 1e6)

    def rest(self) -> None:
        """End the measurement after the first step, whose time does not count: later steps reach the same peak."""
        self._over.set()

    def close(self) -> float:
        self._over.set()
        self.join()
        return self.peak_mb


def make_problems(folder: Path, count: int = 4000) -> Path:
    """Write `count` prompt records of chain_sum into `folder` and return the file."""
    from nemo_prorl.config import DataSource
    from nemo_prorl.data.laptop.generators import generate

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    source = DataSource(name="chain_sum", generator="reasoning_gym:chain_sum", options=options, size=count)
    path = folder / "chain_sum.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in generate(source)))
    return path


def make_model(folder: Path, records: Path) -> Path:
    """Write a random model and return its folder; the constant STOP, one of its weights, sets how often responses end.

    The tokenizer is made from the prompts in the file `records`.
    """
    import torch
    from omegaconf import OmegaConf
    from safetensors.torch import load_file, save_file

    from nemo_prorl.data.laptop.model import EOS, SPECIAL, build_base_model

    prompts = [record["prompt"] for record in read_objects(records)]
    build_base_model(folder, OmegaConf.load(ROOT / "conf" / "model" / "laptop.yaml").model, 1, prompts)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = EMBED
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][SPECIAL.index(EOS)] = 0.0
    weights["lm_head.weight"][SPECIAL.index(EOS), 0] = STOP
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name][0] = 0.0
    save_file({name: torch.clone(w) for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_instructions(folder: Path, model: Path, count: int = 2000) -> Path:
    """Write `count` prompt records of texts with constraints, in the model's chat template; return the file."""
    from transformers import AutoTokenizer

    from nemo_prorl.config import DataSource
    from nemo_prorl.data.laptop.generators import generate

    tokenizer = AutoTokenizer.from_pretrained(model)
    path = folder / "instructions.jsonl"
    with path.open("w") as file:
        for record in generate(DataSource(name="instructions", generator="instructions", size=count)):
            message = [{"role": "user", "content": record["prompt"]}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            file.write(json.dumps({**record, "prompt": text}) + "\n")
    return path


def overrides(folder: Path, model: Path, records: Path, work: Workload) -> list[str]:
    """Return the overrides of the laptop job with the model and prompts, without validation or checkpoints."""
    return [
        f"run_dir={folder}",
        f"pretrained_checkpoint.restore_from_path={model}",
        f"data.train=[{{name: made, path: {records}}}]",
        "data.validation=[]",
        "trainer.warmup.steps=0",
        f"trainer.grpo.prompts_per_step={work.prompts}",
        f"trainer.grpo.samples_per_prompt={work.samples}",
        f"trainer.grpo.updates_per_step={UPDATES}",
        f"trainer.grpo.context_tokens={work.cap + work.room}",
        f"trainer.grpo.max_response_tokens={work.cap}",
        f"trainer.grpo.temperature={work.temperature}",
        f"trainer.grpo.kl_coef={KL}",
        "trainer.grpo.clip_low=0.2",
        "trainer.grpo.clip_high=0.4",
        "trainer.grpo.save_rollout_groups=0",
        "trainer.grpo.checkpoint_every=100000",
        "trainer.grpo.keep_best=0",
        f"rollout.max_num_seqs={work.prompts * work.samples}",
        f"rollout.kv_cache_mb={work.kv_mb}",
    ]


def run_prorl(words: Sequence[str], steps: int | None, limit_s: float = 0.0, prorl: Path = PRORL) -> Block:
    """Run `prorl train` for `steps` steps, or until its steps take `limit_s` seconds together, and time each step."""
    folder = Path(words[0].split("=", 1)[1])
    command = [str(prorl), "train", *words]
    began = time.time()
    process = subprocess.Popen(
        [*command, f"trainer.grpo.max_steps={steps or 100000}"],
        stdout=subprocess.DEVNULL,
        stderr=sys.stderr,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=prorl.parents[3],  # the checkout: `python -m` looks for modules there first
    )
    memory, block, ends, metrics = Memory(process.pid), Block(), [0.0], folder / "metrics.jsonl"
    stopped = False
    while process.poll() is None:
        lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
        now = metrics.stat().st_mtime if lines else 0.0  # time of the newest line
        for line in lines[len(block.steps) :]:
            if not line.endswith("\n"):
                break
            m = json.loads(line)
            parts = {phase: m.get(f"time/{phase}", 0.0) for phase in PHASES}
            seconds = now - ends[-1] if block.steps else m["time/step"]
            row = {"seconds": seconds, "tokens": m["rollout/generated_tokens"], "reward": m["reward/all"]}
            block.steps.append({**row, "truncated": m["rollout/truncated"], "parts": parts})
            block.start_s = block.start_s or now - began - seconds
            ends.append(now)
            memory.rest()
        if limit_s and not stopped and sum(s["seconds"] for s in block.steps) >= limit_s:
            process.terminate()
            stopped = True
        time.sleep(0.1)
    block.peak_mb = memory.close()
    if process.returncode not in (0, 75):
        raise SystemExit(f"prorl train ended with {process.returncode}; see {folder / 'logs'}")
    return block


def trl_job(
    model: Path, records: Path, work: Workload, args: argparse.Namespace, steps: int, way: str
) -> dict[str, Any]:
    """Return the settings that benchmarks/versus_trl_trainer.py reads."""
    cores = args.threads
    processes = cores if way == "processes" else 1
    return {
        "model": str(model),
        "records": str(records),
        "plugin": work.plugin,
        "prompts": work.prompts,
        "samples": work.samples,
        "updates": UPDATES,
        "precision": args.precision,
        "max_tokens": work.cap,
        "temperature": work.temperature,
        "kl_coef": KL,
        "lr": TIMING_LR,
        "steps": steps,
        "processes": processes,
        "threads": cores // processes,
        "seed": 1,
        "options": TRL_OPTIONS[way],
    }


def run_trl(folder: Path, job: dict[str, Any]) -> Block:
    """Run TRL's GRPOTrainer with the settings `job` and time each step."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job))
    command = [str(TRL_PYTHON)]
    if job["processes"] > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job['processes']}"]
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, str(Path(__file__).with_name("versus_trl_trainer.py")), str(folder / "job.json")],
        stdout=subprocess.PIPE,
        stderr=(folder / "log.txt").open("w"),
        text=True,
        env={**os.environ, **HEAP, "OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"},
    )
    memory, block = Memory(process.pid), Block()
    assert process.stdout is not None
    for line in process.stdout:
        block.steps.append(json.loads(line))
        memory.rest()
        block.start_s = block.start_s or time.monotonic() - began - block.steps[0]["seconds"]
    block.peak_mb = memory.close()
    if process.wait():
        raise SystemExit(f"TRL ended with {process.returncode}:\n{(folder / 'log.txt').read_text()[-3000:]}")
    return block


def table(name: str, work: Workload, sides: dict[str, list[Block]]) -> list[str]:
    """Return the lines of one workload: counted steps of each side, ratio of the two fastest, and time by phase."""
    lines = [
        "",
        f"workload {name}: {work.prompts} prompts x {work.samples} responses of at most {work.cap} tokens",
        f"{'':16s} {'steps':>5s} {'s/step':>8s} {'min':>7s} {'max':>7s} {'tokens/s':>9s} {'mean length':>12s}"
        f" {'cut off':>8s} {'peak MB':>8s} {'start s':>8s}",
    ]
    medians, rates = {}, {}
    for side, blocks in sides.items():
        steps = [step for block in blocks for step in block.steps[1:]]
        seconds, tokens = [s["seconds"] for s in steps], sum(s["tokens"] for s in steps)
        medians[side], rates[side] = statistics.median(seconds), tokens / sum(seconds)
        lines.append(
            f"{side:16s} {len(steps):5d} {medians[side]:8.2f} {min(seconds):7.2f} {max(seconds):7.2f}"
            f" {rates[side]:9.0f} {tokens / len(steps) / work.prompts / work.samples:12.1f}"
            f" {100 * statistics.mean(s['truncated'] for s in steps):6.1f} %"
            f" {max(b.peak_mb for b in blocks):8.0f} {statistics.mean(b.start_s for b in blocks):8.1f}"
        )
    trl, ours = (fastest(medians, of) for of in ("TRL", "prorl"))
    lines += [f"median seconds a step, {trl} : {ours} = {medians[trl] / medians[ours]:.2f} : 1"]
    lines += [f"tokens/s (the two sides draw other responses), {ours} : {trl} = {rates[ours] / rates[trl]:.2f} : 1"]
    lines += ["where the time goes, mean seconds a step (of several processes the first):"]
    for side, blocks in sides.items():
        steps = [step for block in blocks for step in block.steps[1:]]
        names = list(dict.fromkeys(part for step in steps for part in step["parts"]))
        means = {part: statistics.mean(step["parts"].get(part, 0.0) for step in steps) for part in names}
        means["other"] = statistics.mean(s["seconds"] for s in steps) - sum(means.values())
        lines.append(f"  {side:14s} " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in means.items()))
    for side in medians:
        if side.startswith("beside "):
            now = side.replace("beside", "prorl")
            lines.append(f"median seconds a step, {side} : {now} = {medians[side] / medians[now]:.3f} : 1")
    return lines


def fastest(medians: dict[str, float], of: str) -> str:
    """Return the way of side `of` ("TRL" or "prorl") with the smallest median of seconds."""
    return min((side for side in medians if side.split()[0] == of), key=lambda side: medians[side])


def sides_of(beside: Path | None) -> dict[str, Path]:
    """Return the `prorl` command of this checkout and, if given, of the checkout `beside`."""
    return {"prorl": PRORL} | ({"beside": beside.resolve() / ".venv" / "train" / "bin" / "prorl"} if beside else {})


def timed_workload(
    name: str, work: Workload, args: argparse.Namespace, folder: Path, model: Path, records: Path
) -> list[str]:
    """Run blocks of all ways in turn; return the lines of the workload's table."""
    sides = defaultdict[str, list[Block]](list)
    steps = 1 + (args.steps or work.steps)
    for k in range(args.rounds):
        for way in args.trl:
            job = trl_job(model, records, work, args, steps, way)
            sides[f"TRL {way}"].append(run_trl(folder / f"trl-{name}-{way}-{k}", job))
        for way in args.prorl:
            for side, prorl in sides_of(args.beside).items():
                words = overrides(folder / f"{side}-{name}-{way}-{k}", model, records, work)
                words += [f"model.optim.lr={TIMING_LR}", "trainer.grpo.dynamic_sampling.enabled=false"]
                words += [*PRORL_WAYS[way].format(n=args.threads).split(), *PRECISIONS[args.precision]]
                words += args.overrides
                sides[f"{side} {way}"].append(run_prorl(words, steps, prorl=prorl))
    return table(name, work, sides)


def warmed_up(args: argparse.Namespace, folder: Path, records: Path, work: Workload) -> Path:
    """Return the folder of the small model after its warm-up."""
    base = folder / "warmup"
    words = [w for w in overrides(base, folder, records, work) if "restore_from" not in w]
    words = [w for w in words if not w.startswith("trainer.warmup")]
    words.append(f"trainer.warmup.steps={args.warmup_steps}")
    command = [str(PRORL), "warmup", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return base / "base"


def learning(args: argparse.Namespace, folder: Path, model: Path, records: Path, work: Workload) -> list[str]:
    """Train both sides from the same model; return a table of mean reward by seconds of training."""
    job = trl_job(model, records, work, args, 100000, args.trl[-1])
    trl = run_trl(folder / "trl-learn", {**job, "lr": work.learning_lr, "limit_s": args.learn_s})
    words = overrides(folder / "prorl-learn", model, records, work)
    words += [f"model.optim.lr={work.learning_lr}", *PRORL_WAYS[args.prorl[-1]].format(n=args.threads).split()]
    ours = run_prorl([*words, *PRECISIONS[args.precision], *args.overrides], None, args.learn_s)
    marks = [args.learn_s * k / 6 for k in range(7)]
    what = "texts with constraints" if args.model else "two-term chain_sum"
    lines = ["", f"reward on {what} (responses of at most {work.cap} tokens), mean over the steps that end within"]
    lines += ["each sixth of the time; prorl with dynamic sampling, its mean is of all responses, dropped ones too"]
    lines.append(f"{'':16s} {'steps':>5s} " + " ".join(f"{high:6.0f} s" for high in marks[1:]))
    for side, block in ((f"TRL {args.trl[-1]}", trl), (f"prorl {args.prorl[-1]}", ours)):
        at, rewards = 0.0, [list[float]() for _ in marks[1:]]
        for step in block.steps:
            at += step["seconds"]
            rewards[min(5, int(6 * at / args.learn_s))].append(step["reward"])
        means = " ".join(f"{statistics.mean(r):8.3f}" if r else f"{'-':>8s}" for r in rewards)
        lines.append(f"{side:16s} {len(block.steps):5d} {means}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, help="measured steps per block; default: by workload")
    parser.add_argument("--rounds", type=int, default=2, help="measured blocks per side and way; default: 2")
    parser.add_argument(
        "--learn-s", type=float, default=240.0, help="seconds of learning per side; 0: none; default: 240"
    )
    parser.add_argument("--warmup-steps", type=int, default=400, help="supervised steps before learning; default: 400")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="cores of each side; its trainer processes have this many threads in all; default: all cores",
    )
    parser.add_argument("--model", type=Path, help="compare on this Hugging Face folder; default: the small models")
    parser.add_argument(
        "--precision",
        choices=list(PRECISIONS),
        default="32",
        help="bf16: TRL's mixed precision, and prorl's trainer.precision with float32 masters; default: %(default)s",
    )
    parser.add_argument("--beside", type=Path, help="another checkout to time, after `make setup`; default: none")
    parser.add_argument("--trl", nargs="+", choices=list(TRL_OPTIONS), default=["generate", "processes"])
    parser.add_argument(
        "--prorl",
        nargs="+",
        choices=list(PRORL_WAYS),
        default=list(PRORL_WAYS),
        help="ways to run prorl; the learning curve uses the last of these ways; default: both",
    )
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for prorl")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])  # inherited by all child processes
    if not TRL_PYTHON.exists():
        raise SystemExit(f"{TRL_PYTHON} does not exist. Fix: python3.11 setup/environments.py --only trl")
    versions = "import trl, transformers, torch; print(trl.__version__, transformers.__version__, torch.__version__)"
    found = subprocess.run([str(TRL_PYTHON), "-c", versions], capture_output=True, text=True, check=True).stdout.split()
    lines = [
        describe(),
        f"TRL {found[0]}, transformers {found[1]}, torch {found[2]}; {args.threads} cores for each,"
        f" precision {args.precision} {args.overrides or ''}".rstrip(),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.model:
            model = args.model.absolute()
            records, workloads = make_instructions(folder, model), {args.model.name: REAL}
        else:
            records, workloads = make_problems(folder), {key: WORKLOADS[key] for key in args.workloads}
            model = make_model(folder / "model", records)
        for key, work in workloads.items():
            sys.stdout.write("\n".join(timed_workload(key, work, args, folder, model, records)) + "\n")
            sys.stdout.flush()
        if args.learn_s:
            work = REAL if args.model else replace(WORKLOADS["short"], cap=LEARN_CAP)
            base = model if args.model else warmed_up(args, folder, records, work)
            sys.stdout.write("\n".join(learning(args, folder, base, records, work)) + "\n")


if __name__ == "__main__":
    main()
