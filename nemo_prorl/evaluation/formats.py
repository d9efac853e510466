"""The files of an evaluation: manifest.json, samples, results.json and comparison.json."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from nemo_prorl.evaluation.catalogue import BenchmarkAbout, Sampling
from nemo_prorl.evaluation.estimates import Interval, Mean
from nemo_prorl.evaluation.readings import Reading
from nemo_prorl.schema import Amount, Constraint, Count, JsonOf, Number, Sha256, Share

ModelKind = Literal["hf", "checkpoint", "run", "endpoint"]
SamplingJson = Annotated[dict[str, Any], JsonOf(Sampling)]


class ModelJson(TypedDict):
    """The evaluated model."""

    name: str
    kind: ModelKind
    sha256: Sha256
    weights_sha256: NotRequired[Sha256]
    step: NotRequired[Count]
    folder: NotRequired[str]
    url: NotRequired[str]
    opens_thought: NotRequired[Literal[True]]


class BenchmarkManifest(BenchmarkAbout):
    """The prompts of a benchmark that were evaluated, and the sampling settings."""

    file: NotRequired[Annotated[str, Constraint(description="path of the user's own file of the benchmark")]]
    file_sha256: Sha256
    prompts_sha256: Sha256
    prompts: Number
    sampling: SamplingJson


class EvaluationManifest(TypedDict):
    """The settings of an evaluation, complete enough for prorl evaluate --manifest to repeat it."""

    format: Literal[1]
    model: ModelJson
    seed: Count
    data: str | None
    limit: Number | None
    benchmarks: dict[str, BenchmarkManifest]
    engine: dict[str, Any] | None
    rewards: dict[str, Any]
    versions: dict[str, str]


class EvaluationSample(TypedDict):
    """One response of an evaluation.  verdicts/BENCHMARK.jsonl has its verdict under the same id and sample."""

    id: str
    sample: Count
    seed: Count
    response: str
    finished: bool
    tokens: Count | None


class FailureCounts(TypedDict):
    """Numbers of responses that could not be judged as answers, by the failure in the verdict."""

    timeout: Count
    invalid: Count


MeanAtK = Annotated[dict[str, Mean], Constraint(propertyNames={"pattern": "^[0-9]+$"})]
IntervalAtK = Annotated[dict[str, Interval], Constraint(propertyNames={"pattern": "^[0-9]+$"})]
_Means = TypedDict(
    "_Means",
    {
        "pass@1": Mean | None,
        "reward": Mean | None,
        "pass@k": MeanAtK,
        "tokens": Mean | None,
        "truncated": Share | None,
    },
)
_Differences = TypedDict("_Differences", {"model": str, "pass@1": Interval, "reward": Interval, "pass@k": IntervalAtK})


class Numbers(_Means):
    """A model's scores and counts on a set of prompts.

    Means are over prompts, after a mean over the samples of each prompt.
    """

    prompts: Count
    samples: Count
    unjudged: Count
    failures: FailureCounts


class BenchmarkNumbers(BenchmarkAbout, Numbers):
    """A benchmark's entry in results.json."""

    sampling: SamplingJson
    parts: dict[str, Numbers]


class GroupNumbers(_Means):
    """The unweighted means over some benchmarks."""

    benchmarks: list[str]
    headline: Mean | None


class EvaluationTime(TypedDict):
    """The duration of the last command that sampled or judged, and its throughput."""

    seconds: Amount
    generated_tokens: Count
    tokens_per_s: float | None


class EvaluationResults(TypedDict):
    """The content of results.json: the numbers of one model on some benchmarks."""

    format: Literal[1]
    complete: bool
    model: ModelJson
    seed: Count
    benchmarks: dict[str, BenchmarkNumbers]
    domains: dict[str, GroupNumbers]
    out_of_distribution: GroupNumbers | None
    time: EvaluationTime


class SolvedCounts(TypedDict):
    """Numbers of prompts that both, only one or neither of two models solved at least once."""

    both: Count
    gained: Count
    lost: Count
    neither: Count


class GroupDifference(_Differences):
    """A model's differences from the base in the mean over some benchmarks."""

    reading: Reading


class Difference(GroupDifference):
    """The differences of a model's scores from the base's, over the prompts judged for both."""

    prompts: Count
    solved: SolvedCounts
    base_k: Number | None


class ComparedPart(TypedDict):
    """A benchmark, or one of its parts: the numbers of each model, and its differences from the base model."""

    models: dict[str, Numbers]
    differences: list[Difference]


class ComparedBenchmark(BenchmarkAbout, ComparedPart):
    """A benchmark with each model's numbers and differences, as a whole and by part."""

    parts: dict[str, ComparedPart]


class ComparedGroup(TypedDict):
    """The models' differences from the base in the mean over some benchmarks."""

    benchmarks: list[str]
    differences: list[GroupDifference]


class ComparedModel(TypedDict):
    """A compared model and the folder of its evaluation."""

    name: str
    folder: str
    model: ModelJson


class Bootstrap(TypedDict):
    """The settings of the bootstrap that produced the intervals."""

    resamples: Number
    seed: Count
    level: Annotated[float, Constraint(exclusiveMinimum=0, maximum=1)]


class EvaluationComparison(TypedDict):
    """The content of comparison.json: two or more evaluated models on the same prompts."""

    format: Literal[1]
    base: str
    models: Annotated[list[ComparedModel], Constraint(minItems=2)]
    bootstrap: Bootstrap
    skipped: list[str]
    benchmarks: dict[str, ComparedBenchmark]
    domains: dict[str, ComparedGroup]
    out_of_distribution: ComparedGroup | None
