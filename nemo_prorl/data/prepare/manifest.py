"""The type of manifest.json in a prepared folder."""

from typing import Annotated, Literal, NotRequired, TypedDict

from nemo_prorl.schema import Constraint, Count, Number, Sha256, Share


class InputFile(TypedDict):
    """A file that was read."""

    file: str
    sha256: Sha256
    rows: Count


class OutputFile(TypedDict):
    """A file that was written."""

    file: str
    records: Number
    sha256: Sha256


class RecordCounts(TypedDict):
    """Numbers of records; read = kept + the sum of dropped."""

    read: Count
    kept: Count
    dropped: dict[str, Number]
    """number of dropped records by reason"""
    train: NotRequired[Number]
    validation: NotRequired[Number]


class GoldCheck(TypedDict):
    """Gold answers of the source, judged by the plugin."""

    checked: Count
    failed: Count
    without: Count
    """records without a gold answer"""


class ExpectedCheck(TypedDict):
    """Counts of the tests whose expected results were computed by running the source's own solution."""

    tests: Number
    left_out: Count
    """tests on which the solution failed, or whose result is not JSON or longer than 100,000 bytes"""


class EvaluationFile(InputFile):
    """A file of an evaluation set; `dropped`: records that overlap with it."""

    dropped: Count


class ContaminationCheck(TypedDict):
    """Check for overlap of the records with evaluation sets."""

    ngram: Number
    """value of --ngram: consecutive words that an overlap has in common"""
    overlap: Share
    """value of --overlap: share of the shorter text that an overlap has in common"""
    ngram_only: Count
    """records that were kept: n consecutive words in common, but less than the share `overlap`"""
    template_ngrams: Count
    """n-grams that are ignored, because so many problems of an evaluation file have them that they are template text"""
    against: list[EvaluationFile]


class LengthCheck(TypedDict):
    """Check of the prompts' lengths in tokens."""

    max_prompt_tokens: Count
    longest_kept: Count
    tokenizer_sha256: Sha256 | None


class AgreementCheck(TypedDict):
    """Check whether a problem's two solutions agree; counts by verdict."""

    by: Literal["judge", "grader"]
    model: NotRequired[str]
    counts: dict[Literal["agree", "disagree", "unclear", "no answer"], Count]
    requests: NotRequired[Count]
    """judge: different pairs of solutions that were judged, now or by an earlier command (from the cache)"""
    prompt_tokens: NotRequired[Count]
    """judge: tokens of these requests, as far as the replies count them (`usage`); without repeated requests"""
    completion_tokens: NotRequired[Count]
    """judge: tokens of the replies, as far as they count them"""


class Checks(TypedDict):
    """Results of the checks of the records."""

    gold: GoldCheck
    expected: NotRequired[ExpectedCheck]
    contamination: NotRequired[ContaminationCheck]
    length: NotRequired[LengthCheck]
    agreement: NotRequired[AgreementCheck]


class HubSource(TypedDict, total=False):
    """Data set and commit on the Hugging Face hub, only with --from hub."""

    repo: str
    commit: str


_From = TypedDict(
    "_From", {"from": Annotated[str, Constraint(description="a path, hub, or the package that made the problems")]}
)


class PreparedManifest(_From, HubSource):
    """The content of manifest.json: files read and written, numbers of records, and results of the checks."""

    format: Literal[1]
    source: str
    task: str
    licence: str
    """as the publisher states it"""
    command: list[str]
    version: str
    """version of nemo_prorl"""
    inputs: list[InputFile]
    counts: RecordCounts
    checks: Checks
    outputs: Annotated[list[OutputFile], Constraint(minItems=1)]
