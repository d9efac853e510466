"""The long tail of generation: a discrete-event simulation of rollouts on 32 engines under several schedulers.

.venv/train/bin/python benchmarks/simulate.py                  the table, under a minute
.venv/train/bin/python benchmarks/simulate.py --steps 40 --seed 2 --engines 8

The code of a run decides which groups are drawn, kept, carried over and dropped (`algorithms.dynamic_sampling`), and
which engine generates which responses (`rollout.scheduling`).  Lengths, verdicts, engines and reward workers are
simulated.  All schedulers see the same prompts with the same lengths and verdicts.
These are assumptions, not measurements of a model:

Lengths: log-normal, exp(m + 0.45 u + 0.5 v) tokens, with standard normal u per prompt and v per response, cut off at
the cap; exp(m) by task as in TASKS.  Like a reasoning model of 1.5B parameters, this gives thousands of tokens.  At 8k,
0 to 20 % of a task's responses are cut off, 8 % in all; the paper gives no numbers.
Verdicts: a prompt's group is kept with the probability of its task in TASKS, which falls by 0.5 % per step.
Rewards: exponential latency with the mean of TASKS, 192 workers (48 on each of four nodes, as cluster=h100_4x8).
Engine: vLLM on one H100, Qwen2 1.5B in bfloat16.  One token for each of b sequences with K tokens of cache takes
4 ms (weights of 3.1 GB read at 3.35 TB/s: 0.9; launches and scheduling: 3.1) + 0.012 ms b (sampling with its
log-probability, output) + K * 28.7 kB / 2.7 TB/s (cache read at four fifths of the bandwidth; 28 layers, 2 key-value
heads of 128, bfloat16).  That is 250 tokens/s alone and 20,500 tokens/s at 256 sequences of 2,000 tokens.
Prefill: 300 tokens per prompt at 100,000 tokens/s, once in each engine that generates responses to the prompt.
Dispatch: 0.8 ms of rank 0 for each request, one after the other.
Trainer: two passes for log-probabilities and an update, in all 10 operations per parameter and token, at 40 % of the
bfloat16 peak of 32 H100s, and 3 s for publication and the rest.
"""

import argparse
import heapq
import itertools
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from machine import describe

from nemo_prorl.algorithms.dynamic_sampling import DynamicSampler, KeepRates
from nemo_prorl.config import DynamicSamplingConfig
from nemo_prorl.rollout.scheduling import is_fresh, spread

# task: exp(m) of the length, keep rate, mean reward latency in seconds
TASKS = {
    "math": (3800.0, 0.60, 0.05),
    "code": (4600.0, 0.70, 1.0),
    "stem": (2800.0, 0.50, 0.05),
    "puzzles": (2400.0, 0.40, 0.1),
    "instructions": (1200.0, 0.75, 0.02),
}
PROMPT_TOKENS, PREFILL_TOKENS_PER_S = 300, 1e5
FIXED_S, PER_SEQUENCE_S, PER_CACHED_TOKEN_S = 4e-3, 1.2e-5, 28672 / 2.7e12
REWARD_WORKERS, DISPATCH_S = 192, 8e-4
GPUS = 32
TRAIN_S_PER_TOKEN, OTHER_S = 10 * 1.54e9 / (GPUS * 0.4 * 989e12), 3.0
MOST = 512  # limit of responses per engine, as in EnginePool


@dataclass(frozen=True)
class Prompt:
    """A prompt: task, lengths of its responses in tokens, their reward latencies in seconds.

    `kept`: whether dynamic sampling keeps the group of its responses.
    """

    task: str
    lengths: list[int]
    latencies: list[float]
    kept: bool


@dataclass(frozen=True)
class Size:
    """Sizes of a run: engines, prompts per step, responses per prompt, and the cap of a response in tokens."""

    engines: int = 32
    prompts: int = 256
    samples: int = 16
    cap: int = 8192


def prompts(seed: int, size: Size) -> Iterator[Prompt]:
    """Yield prompts without end; the n-th prompt is the same for all schedulers."""
    names = list(TASKS)
    for number in itertools.count():
        rng = np.random.default_rng([seed, number])
        task = names[int(rng.integers(len(names)))]
        typical, rate, latency = TASKS[task]
        u, v_N = rng.standard_normal(), rng.standard_normal(size.samples)
        lengths = np.minimum(size.cap, np.maximum(16, typical * np.exp(0.45 * u + 0.5 * v_N))).astype(int).tolist()
        rate *= 0.995 ** (number / (2 * size.prompts))
        yield Prompt(task, lengths, rng.exponential(latency, size.samples).tolist(), bool(rng.random() < rate))


class Engine:
    """An engine with continuous batching: all its sequences get their next token together."""

    def __init__(self) -> None:
        self.now = self.tokens_done = 0.0  # seconds; tokens of a sequence that has run since the start
        self.cached = 0.0  # tokens in the cache
        self.stall = self.idle_s = 0.0  # seconds of prefill still to do; seconds without any sequence
        self.running: list[tuple[float, int]] = []  # (tokens_done at its end, response)

    def _seconds(self, tokens: float) -> float:
        """Return the seconds in which each running sequence gets `tokens` more tokens."""
        b = len(self.running)
        growth = PER_CACHED_TOKEN_S * b * tokens * tokens / 2
        return tokens * (FIXED_S + PER_SEQUENCE_S * b + PER_CACHED_TOKEN_S * self.cached) + growth

    def next_end(self) -> float:
        """Return the time, in seconds, at which the next sequence ends unless another sequence is added before."""
        return self.now + self.stall + self._seconds(self.running[0][0] - self.tokens_done)

    def advance(self, now: float) -> None:
        """Generate until the time `now`, in seconds."""
        passed, self.now = now - self.now, now
        if not self.running:
            self.idle_s += passed
            return
        stalled = min(self.stall, passed)
        self.stall -= stalled
        passed -= stalled
        b = len(self.running)
        slope, curve = FIXED_S + PER_SEQUENCE_S * b + PER_CACHED_TOKEN_S * self.cached, PER_CACHED_TOKEN_S * b
        tokens = (math.sqrt(slope * slope + 2 * curve * passed) - slope) / curve
        self.tokens_done += tokens
        self.cached += b * tokens

    def add(self, responses: list[tuple[int, int]]) -> None:
        """Start responses of one prompt, given as (length in tokens, number of the response)."""
        self.stall += PROMPT_TOKENS / PREFILL_TOKENS_PER_S
        for length, response in responses:
            heapq.heappush(self.running, (self.tokens_done + length, response))
            self.cached += PROMPT_TOKENS

    def pop(self, lengths: dict[int, int]) -> int:
        """Remove the sequence that ends now; return the number of its response.  `lengths`: tokens by response."""
        self.tokens_done, response = heapq.heappop(self.running)
        self.cached = self.cached - PROMPT_TOKENS - lengths[response] if self.running else 0.0
        return response


class Unmeasured(KeepRates):
    """A substitute for measured keep rates: each rate stays at 1, as if every group were kept."""

    def __getitem__(self, task: str) -> float:
        return 1.0


def fixed_split(in_flight: list[int], number: int, responses: int) -> list[int]:
    """Return the number of responses for each engine: all go to the next engine in turn, whatever its load.

    Args (the same for all routes):
        in_flight: open responses of each engine.
        number: place of the prompt among the prompts drawn in this step, from 1.
        responses: number of the prompt's responses that are not yet sent.
    """
    return [responses if engine == number % len(in_flight) else 0 for engine in range(len(in_flight))]


def whole_groups(in_flight: list[int], number: int, responses: int) -> list[int]:
    """Return the number of responses for each engine: all go to the least loaded engine, or none if it has no room.

    The arguments are those of `fixed_split`.
    """
    least = min(range(len(in_flight)), key=in_flight.__getitem__)
    fits = responses if in_flight[least] + responses <= MOST else 0
    return [fits if engine == least else 0 for engine in range(len(in_flight))]


def spread_groups(in_flight: list[int], number: int, responses: int) -> list[int]:
    """Return the number of responses for each engine, as a run does: 4 responses at a time go to the least loaded.

    Args: as for `fixed_split`.
    """
    return spread(in_flight, responses, MOST)


def spread_one_by_one(in_flight: list[int], number: int, responses: int) -> list[int]:
    """Return the number of responses for each engine if `spread` assigns them to the least loaded one by one.

    The arguments are those of `fixed_split`.
    """
    return spread(in_flight, responses, MOST, part=1)


@dataclass(frozen=True)
class Scheduler:
    """A way to draw prompts and to assign responses to engines; each scheduler is a line of the table."""

    name: str
    # (open responses of each engine, number of a prompt, its unsent responses) -> responses to send to each engine
    route: Callable[[list[int], int, int], list[int]]
    # margin of cluster=h100_4x8
    dynamic: DynamicSamplingConfig = field(default_factory=lambda: DynamicSamplingConfig(margin=3.0))
    measured: bool = True  # keep rates are measured, otherwise 1
    keep_surplus: bool = True  # groups that a step did not use join the next step; otherwise they are thrown away


@dataclass
class Group:
    """A drawn prompt.  `step`: the step in which it was drawn; `open`: number of responses without a verdict."""

    prompt: Prompt
    step: int
    open: int


@dataclass
class Outcome:
    """The result of a step: seconds of its rollout, share of engine time without any sequence, and counts."""

    rollout_s: float = 0.0
    idle_share: float = 0.0
    drawn: int = 0  # prompts drawn in this step
    late: int = 0  # prompts drawn after the first group was kept or dropped
    tokens: int = 0  # response tokens of the drawn prompts
    trained_tokens: int = 0  # response tokens of the groups that are trained on
    carried: int = 0  # surplus groups of the previous step
    groups: int = 0  # groups that are trained on

    @property
    def step_s(self) -> float:
        return self.rollout_s + TRAIN_S_PER_TOKEN * self.trained_tokens + OTHER_S


class Rollout:
    """The rollout of one step."""

    def __init__(self, scheduler: Scheduler, source: Iterator[Prompt], rates: KeepRates, step: int, size: Size) -> None:
        self.scheduler, self.source, self.step, self.size = scheduler, source, step, size
        self.engines = [Engine() for _ in range(size.engines)]
        self.in_flight, self.epoch = [0] * size.engines, [0] * size.engines
        self.events: list[
            tuple[float, int, int, int]
        ] = []  # time, order, engine (-1: a verdict), and epoch, response or request
        self.order = itertools.count()
        self.workers = [0.0] * REWARD_WORKERS
        self.group_of: dict[int, Group] = {}  # group of each response
        self.lengths: dict[int, int] = {}
        self.latency: dict[int, float] = {}
        self.waiting: deque[tuple[int, list[int]]] = deque()  # number of a prompt, responses that wait for an engine
        self.sampler = DynamicSampler(size.prompts, rates, scheduler.dynamic)
        self.undecided: deque[Group] = deque()
        self.sent: dict[int, list[int]] = {}  # requests in transit
        self.outcome = Outcome()
        self.now = self.dispatched_at = 0.0

    def run(self, surplus: list[Group]) -> list[Group]:
        """Simulate until every started sequence has ended, as in a run; return the surplus groups."""
        for group in surplus:
            self.sampler.carry(group.prompt.task)
            self.undecided.append(group)
        self._decide()
        while self.events:
            self.now, _, engine, value = heapq.heappop(self.events)
            if value in self.sent:
                self._arrived(engine, self.sent.pop(value))
            elif engine < 0:
                self._judged(value)
            elif self.epoch[engine] == value:
                self._ended(engine)
        out, sampler = self.outcome, self.sampler
        for engine_ in self.engines:
            engine_.advance(self.now)
        out.rollout_s, out.drawn, out.carried, out.groups = self.now, sampler.started, sampler.carried, sampler.kept
        out.idle_share = sum(e.idle_s for e in self.engines) / max(1e-9, len(self.engines) * self.now)
        return list(self.undecided)

    def _decide(self) -> None:
        """Draw the prompts that the sampler wants, and decide the judged groups, strictly in draw order."""
        while not self.sampler.done:
            while self.sampler.wants_more():
                self._draw()
            if self.undecided[0].open:
                return
            group = self.undecided.popleft()
            if self.sampler.decide(group.prompt.kept):
                self.outcome.trained_tokens += sum(group.prompt.lengths)

    def _draw(self) -> None:
        prompt = next(self.source)
        self.sampler.dispatched(prompt.task)
        self.outcome.late += self.sampler.decided > 0
        group = Group(prompt, self.step, len(prompt.lengths))
        self.undecided.append(group)
        responses = [next(self.order) for _ in prompt.lengths]
        for response, length, latency in zip(responses, prompt.lengths, prompt.latencies, strict=True):
            self.group_of[response], self.lengths[response], self.latency[response] = group, length, latency
        self.outcome.tokens += sum(prompt.lengths)
        self.waiting.append((self.sampler.started, responses))
        self._dispatch()

    def _dispatch(self) -> None:
        while self.waiting:
            number, responses = self.waiting[0]
            shares = self.scheduler.route(self.in_flight, number, len(responses))
            for engine, share in enumerate(shares):
                if share:
                    request, part, responses = -next(self.order), responses[:share], responses[share:]
                    self.sent[request] = part
                    self.in_flight[engine] += share
                    self.dispatched_at = max(self.now, self.dispatched_at) + DISPATCH_S
                    heapq.heappush(self.events, (self.dispatched_at, next(self.order), engine, request))
            if responses:
                self.waiting[0] = number, responses
                return
            self.waiting.popleft()

    def _arrived(self, engine: int, responses: list[int]) -> None:
        self.engines[engine].advance(self.now)
        self.engines[engine].add([(self.lengths[response], response) for response in responses])
        self._schedule(engine)

    def _schedule(self, engine: int) -> None:
        self.epoch[engine] += 1
        if self.engines[engine].running:
            at = self.engines[engine].next_end()
            heapq.heappush(self.events, (at, next(self.order), engine, self.epoch[engine]))

    def _ended(self, engine: int) -> None:
        self.engines[engine].advance(self.now)
        response = self.engines[engine].pop(self.lengths)
        self.in_flight[engine] -= 1
        self._schedule(engine)
        judged = max(self.now, self.workers[0]) + self.latency[response]
        heapq.heapreplace(self.workers, judged)
        heapq.heappush(self.events, (judged, next(self.order), -1, response))
        self._dispatch()

    def _judged(self, response: int) -> None:
        group = self.group_of[response]
        group.open -= 1
        if not group.open:
            self._decide()


def simulate(scheduler: Scheduler, size: Size, steps: int, seed: int, skip: int = 2) -> list[Outcome]:
    """Simulate `skip` + `steps` steps; return the outcomes of the last `steps`.

    The first steps are left out because keep rates are hardly known in them.
    """
    source = prompts(seed, size)
    rates = KeepRates() if scheduler.measured else Unmeasured()
    surplus: list[Group] = []
    outcomes = []
    for step in range(1, steps + skip + 1):
        fresh = [group for group in surplus if is_fresh(group.step, step, scheduler.dynamic.max_staleness)]
        rollout = Rollout(scheduler, source, rates, step, size)
        surplus = rollout.run(fresh if scheduler.keep_surplus else [])
        outcomes.append(rollout.outcome)
    return outcomes[skip:]


OURS = Scheduler("OURS: groups in parts of 4, margin of 3 deviations", spread_groups)
NO_MARGIN = DynamicSamplingConfig(margin=0.0)
SCHEDULERS = (
    Scheduler("fixed split, refilled as groups drop out", fixed_split, NO_MARGIN, measured=False),
    Scheduler("whole groups to the least loaded, the same", whole_groups, NO_MARGIN, measured=False),
    Scheduler("fixed split, measured keep rates", fixed_split, NO_MARGIN),
    Scheduler("least loaded, measured keep rates", whole_groups, NO_MARGIN),
    Scheduler("least loaded, margin of 3 deviations", whole_groups),
    OURS,
    Scheduler("ours, a request for each response", spread_one_by_one),
    Scheduler("ours, surplus thrown away", spread_groups, keep_surplus=False),
)
COLUMNS = ("rollout s", "step s", "idle", "drawn", "late", "carried", "Mtokens")


def line(name: str, outcomes: list[Outcome]) -> str:
    """Return the line of one scheduler in the table: means over its steps."""

    def mean(key: str) -> float:
        return statistics.mean(getattr(outcome, key) for outcome in outcomes)

    return (
        f"{name:52s}{mean('rollout_s'):10.1f}{mean('step_s'):10.1f}{100 * mean('idle_share'):9.1f}%"
        f"{mean('drawn'):10.1f}{mean('late'):10.1f}{mean('carried'):10.1f}{mean('tokens') / 1e6:10.1f}"
    )


def split_table(steps: int, seed: int, samples: int) -> Iterator[str]:
    """Yield the table of layouts in which some GPUs only generate and the others only train.

    The columns are seconds: of the rollout; of training; and of a step in three ways.  "in turn": rollout, then
    training.  "meanwhile": log-probabilities of complete groups (4 of the 10 operations) are computed during the
    rollout.  "one step off": training on the previous batch takes place during the rollout.
    """
    columns = ("rollout", "training", "in turn", "meanwhile", "one step off")
    for cap in (8192, 16384):
        shared = simulate(OURS, Size(GPUS, samples=samples, cap=cap), steps, seed)
        trained = statistics.mean(outcome.trained_tokens for outcome in shared)
        head = f"cap of {cap} tokens, seconds"
        yield f"\n{head:36s}" + "".join(f"{column:>14s}" for column in columns)
        together = statistics.mean(outcome.step_s for outcome in shared)
        yield f"{f'all {GPUS} GPUs do both':64s}{together:14.1f}"
        for engines in (28, 26, 24, 20, 16):
            outcomes = simulate(OURS, Size(engines, samples=samples, cap=cap), steps, seed)
            rollout = statistics.mean(outcome.rollout_s for outcome in outcomes)
            train = TRAIN_S_PER_TOKEN * trained * GPUS / (GPUS - engines)
            steps_s = (rollout + train, rollout + 0.6 * train, max(rollout, train))
            numbers = (rollout, train, *(seconds + OTHER_S for seconds in steps_s))
            yield f"{f'{engines} generate, {GPUS - engines} train':36s}" + "".join(f"{x:14.1f}" for x in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument(
        "--margins",
        type=float,
        nargs="+",
        help="values of dynamic_sampling.margin: compare them with our scheduler; default: compare all schedulers",
    )
    parser.add_argument("--split", action="store_true", help="compare layouts in which some GPUs only generate")
    args = parser.parse_args()
    if args.split:
        rows = split_table(args.steps, args.seed, args.samples)
        sys.stdout.writelines(f"{row}\n" for row in itertools.chain([describe(), ""], rows))
        return
    margins = [
        Scheduler(f"ours, margin of {m:g}", spread_groups, DynamicSamplingConfig(margin=m)) for m in args.margins or ()
    ]
    write = sys.stdout.write
    write(f"{describe()}\n{args.steps} simulated steps, seed {args.seed}, {args.engines} engines, 256 prompts x ")
    write(f"{args.samples}; means per step.  idle: share of engine time without any sequence, also while only\n")
    write("rewards are pending.  drawn: prompts drawn; late: prompts drawn after the first decision, each costs\n")
    write("another wait; carried: groups of the previous step\n")
    for cap in (8192, 16384):
        size = Size(args.engines, samples=args.samples, cap=cap)
        write("\n" + f"cap of {cap} tokens".ljust(52) + "".join(f"{column:>10s}" for column in COLUMNS) + "\n")
        for scheduler in margins or SCHEDULERS:
            write(line(scheduler.name, simulate(scheduler, size, args.steps, args.seed)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
