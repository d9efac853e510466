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
    """over weights, config.json and tokenizer; for an endpoint, over URL, name and `opens_thought`"""
    weights_sha256: NotRequired[Sha256]
    """over the weights only, as in the summary.json of a run; absent for an endpoint"""
    step: NotRequired[Count]
    """training step of the weights, for a checkpoint or a run directory"""
    folder: NotRequired[str]
    """absolute path of MODEL; absent for an endpoint"""
    url: NotRequired[str]
    """only for an endpoint"""
    opens_thought: NotRequired[Literal[True]]
    """the chat template of the endpoint ends the prompt in `<think>`"""


class ScorerEntry(TypedDict):
    """What judges a benchmark."""

    scorer: NotRequired[str]
    """code that judges the task: FILE.py:FUNCTION of the user with a sha256 instead of the path, over the file and the
    modules beside it that it imports; or `plugin NAME SHA256`, over the plugin's package"""
    function: NotRequired[str]
    """FILE.py:FUNCTION of the user that judges the task, with an absolute path"""


class BenchmarkManifest(BenchmarkAbout, ScorerEntry):
    """The prompts of a benchmark that were evaluated, and the sampling settings."""

    file: NotRequired[Annotated[str, Constraint(description="path of the user's own file of the benchmark")]]
    file_sha256: Sha256
    """of the .yaml or .jsonl file that defines the benchmark"""
    prompts_sha256: Sha256
    """over ids, tasks, prompts and truths of the evaluated prompt records"""
    prompts: Number
    """number of evaluated prompts"""
    sampling: SamplingJson


class EvaluationManifest(TypedDict):
    """The settings of an evaluation, complete enough for prorl evaluate --manifest to repeat it."""

    format: Literal[1]
    model: ModelJson
    seed: Count
    data: str | None
    """absolute path of --data"""
    limit: Number | None
    """maximum number of prompts per benchmark; null: no maximum"""
    benchmarks: dict[str, BenchmarkManifest]
    engine: dict[str, Any] | None
    """settings of the engines, and form of the prompts; null for an endpoint"""
    rewards: dict[str, Any]
    """settings of the reward plugins, by plugin"""
    functions_time_s: NotRequired[float]
    """CPU seconds that the user's reward functions may use for a response; older versions did not record it"""
    versions: dict[str, str]
    """version by package"""
    verdicts: NotRequired[str]
    """folder of the verdicts that count, after prorl evaluate --judge-again; absent: verdicts"""


class EvaluationSample(TypedDict):
    """One response of an evaluation.  verdicts/BENCHMARK.jsonl has its verdict under the same id and sample."""

    id: str
    """id of the prompt record"""
    sample: Count
    """number of the response among the responses to its prompt, counted from 0"""
    seed: Count
    response: str
    finished: bool
    """false if the response was cut off before its end"""
    tokens: Count | None
    """tokens of the response; null if the endpoint did not report them"""


class FailureCounts(TypedDict):
    """Numbers of responses that score 0 because of a failure, by `failure` of the verdict."""

    timeout: Count
    """the judgement exceeded the time budget of the reward plugin"""
    invalid: Count
    """the answer is malformed"""


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
    """samples of the prompt that has the fewest"""
    unjudged: Count
    """responses without a verdict"""
    without_form: Share | None
    """responses without the form of an answer that the task asks for; null for tasks without one"""
    failures: FailureCounts


class BenchmarkNumbers(BenchmarkAbout, Numbers):
    """A benchmark's entry in results.json."""

    sampling: SamplingJson
    scorer: NotRequired[str]
    """code that gave the verdicts, as in manifest.json"""
    parts: dict[str, Numbers]
    categories: NotRequired[dict[str, Numbers]]
    """puzzles of reasoning-gym by category; absent if there is only one"""


class GroupNumbers(_Means):
    """The unweighted means over some benchmarks."""

    benchmarks: list[str]
    headline: Mean | None
    """mean of each benchmark's own `metric`: pass@1 or reward"""


class EvaluationTime(TypedDict):
    """The duration of the last command that sampled or judged, and its throughput."""

    seconds: Amount
    generated_tokens: Count
    tokens_per_s: float | None
    judged: NotRequired[str]
    """when the last verdict was given: date and time in UTC, ISO 8601"""


class EvaluationResults(TypedDict):
    """The content of results.json: the numbers of one model on some benchmarks."""

    format: Literal[1]
    complete: bool
    """whether all samples of all prompts exist and have a verdict"""
    model: ModelJson
    seed: Count
    verdicts: NotRequired[str]
    """folder of the verdicts from which the numbers were computed; absent: verdicts"""
    benchmarks: dict[str, BenchmarkNumbers]
    domains: dict[str, GroupNumbers]
    out_of_distribution: GroupNumbers | None
    time: EvaluationTime


class SolvedCounts(TypedDict):
    """Numbers of prompts that a model and the base model solved at least once."""

    both: Count
    gained: Count
    """prompts that only the model solved"""
    lost: Count
    """prompts that only the base model solved"""
    neither: Count


class GroupDifference(_Differences):
    """A model's differences from the base in the mean over some benchmarks."""

    reading: Reading
    """what the confidence intervals of the differences show"""


class Difference(GroupDifference):
    """The differences of a model's scores from the base's, over the prompts judged for both."""

    prompts: Count
    """number of prompts judged for both models"""
    solved: SolvedCounts
    base_k: Number | None
    """least k at which the base's pass@k reaches the model's pass@1; null if no measured k does"""


class ComparedPart(TypedDict):
    """A benchmark, or one of its parts: each model's numbers, and the other models' differences from the base."""

    models: dict[str, Numbers]
    differences: list[Difference]


class ComparedBenchmark(BenchmarkAbout, ComparedPart):
    """A benchmark with each model's numbers and differences, as a whole and by part."""

    parts: dict[str, ComparedPart]
    categories: NotRequired[dict[str, ComparedPart]]
    """puzzles of reasoning-gym by category; absent if there is only one"""


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


class TaskGain(TypedDict):
    """A task's pass@k of the base, and the gain of a model over it."""

    task: str
    """BENCHMARK, or BENCHMARK/DATA SET for puzzles"""
    base: Share
    gain: float


class Correlation(TypedDict):
    """Pearson's correlation over tasks, and its bootstrap confidence interval."""

    r: float
    low: float
    high: float


class GainByStart(TypedDict):
    """A model's gains in pass@k by task, from the lowest pass@k of the base to the highest."""

    model: str
    k: Number
    """the largest k that all tasks have, at most 128"""
    tasks: list[TaskGain]
    correlation: Correlation | None
    """between `base` and `gain`; null: fewer than 8 tasks, or no differences"""


class EvaluationComparison(TypedDict):
    """The content of comparison.json: two or more evaluated models on the same prompts."""

    format: Literal[1]
    base: str
    """name of the base model"""
    models: Annotated[list[ComparedModel], Constraint(minItems=2)]
    bootstrap: Bootstrap
    skipped: list[str]
    """benchmarks that are left out because not all models were evaluated on them"""
    benchmarks: dict[str, ComparedBenchmark]
    domains: dict[str, ComparedGroup]
    out_of_distribution: ComparedGroup | None
    gains: list[GainByStart]
    """one entry per model other than the base; a model with a single sample per prompt has none"""


PublishedVerdict = Literal["within", "lower", "higher", "no number", "not evaluated", "not published"]


class PublishedRow(TypedDict):
    """A score beside the published ones.  All scores are between 0 and 1."""

    ours: Mean | None
    """in the benchmark's metric; null: not evaluated, or no response has a verdict"""
    published: dict[str, Share]
    """by column"""
    difference: float | None
    """our score minus that of the model's column; null if one of them is missing"""
    se: Amount | None
    """standard error of the difference; null if the difference is null, or for a single prompt"""
    same_prompts: bool
    """both sides answered the same prompts, so that the standard error counts the sampling only"""
    verdict: PublishedVerdict
    hints: list[str]
    """what the evaluation knows that may explain the difference"""


class PublishedModel(TypedDict):
    """An evaluated model beside the published scores."""

    name: str
    folder: str
    model: ModelJson
    column: str
    """column that the model is compared with"""
    threshold: Amount
    """a difference of more standard errors is lower or higher"""
    benchmarks: dict[str, PublishedRow]
    categories: dict[str, PublishedRow]
    """means over the tasks of a category of reasoning_gym"""
    domains: dict[str, PublishedRow]
    """means over the benchmarks of a domain"""


class PublishedColumn(TypedDict):
    """A model with published scores."""

    name: str
    source: str


class PublishedComparison(TypedDict):
    """The content of published.json: evaluated models beside published scores."""

    format: Literal[1]
    sources: dict[str, str]
    columns: dict[str, PublishedColumn]
    level: Annotated[float, Constraint(exclusiveMinimum=0, maximum=1)]
    """chance that an evaluation like the published one has any row outside"""
    models: Annotated[list[PublishedModel], Constraint(minItems=1)]
