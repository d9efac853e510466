"""manifest.json of a prepared folder."""

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
    """read = kept + all that was dropped."""

    read: Count
    kept: Count
    dropped: dict[str, Number]
    """by reason"""
    train: NotRequired[Number]
    validation: NotRequired[Number]


class GoldCheck(TypedDict):
    """Right answers of the source, judged by the plugin."""

    checked: Count
    failed: Count
    without: Count
    """records whose source gives no right answer to try"""


class ExpectedCheck(TypedDict):
    """Expected results that the source's own solution gave."""

    tests: Number
    left_out: Count
    """tests on which the solution failed, or whose result is not JSON or longer than 100,000 bytes"""


class EvaluationFile(InputFile):
    """A file of an evaluation set, and how many records it shares a problem with."""

    dropped: Count


class ContaminationCheck(TypedDict):
    """The records against evaluation sets."""

    ngram: Number
    overlap: Share
    ngram_only: Count
    """records with n words in common and too little else: kept"""
    template_ngrams: Count
    against: list[EvaluationFile]


class LengthCheck(TypedDict):
    """The prompts' lengths in tokens."""

    max_prompt_tokens: Count
    longest_kept: Count
    tokenizer_sha256: Sha256 | None


class AgreementCheck(TypedDict):
    """Whether two solutions agree; by verdict."""

    by: Literal["judge", "grader"]
    model: NotRequired[str]
    counts: dict[Literal["agree", "disagree", "unclear"], Count]


class Checks(TypedDict):
    """What the records were checked for."""

    gold: GoldCheck
    expected: NotRequired[ExpectedCheck]
    contamination: NotRequired[ContaminationCheck]
    length: NotRequired[LengthCheck]
    agreement: NotRequired[AgreementCheck]


class HubSource(TypedDict, total=False):
    """Where the rows come from, with --from hub."""

    repo: str
    commit: str


_From = TypedDict(
    "_From", {"from": Annotated[str, Constraint(description="a path, hub, or the package that made the problems")]}
)


class PreparedManifest(_From, HubSource):
    """What prorl data prepare read, kept, left out and wrote."""

    format: Literal[1]
    source: str
    task: str
    licence: str
    """as its publisher states it"""
    command: list[str]
    version: str
    """of nemo_prorl"""
    inputs: list[InputFile]
    counts: RecordCounts
    checks: Checks
    outputs: Annotated[list[OutputFile], Constraint(minItems=1)]
