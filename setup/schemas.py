"""Generates the JSON schemas in docs/schemas from the Python types of the file formats.

python setup/schemas.py            writes the schemas
python setup/schemas.py --check    lists the schemas that are out of date; exit code 1 if there are any
"""

import json
import sys
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import typing_extensions
from pydantic import ConfigDict, TypeAdapter

if sys.version_info < (3, 12):  # pydantic needs the TypedDict of typing_extensions before Python 3.12
    typing.TypedDict = typing_extensions.TypedDict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nemo_prorl.algorithms.entropy import EntropyState  # noqa: E402
from nemo_prorl.data import records  # noqa: E402
from nemo_prorl.data.blend import BlendState  # noqa: E402
from nemo_prorl.data.prepare.manifest import PreparedManifest  # noqa: E402
from nemo_prorl.evaluation import formats as evaluation  # noqa: E402
from nemo_prorl.launcher import formats as launcher  # noqa: E402
from nemo_prorl.launcher.peers import Launch, NodeState  # noqa: E402
from nemo_prorl.lifecycle.checkpoints import ImportedState  # noqa: E402
from nemo_prorl.lifecycle.control import Request  # noqa: E402
from nemo_prorl.lifecycle.journal_events import JournalEvent  # noqa: E402
from nemo_prorl.lifecycle.resets import ResetsState  # noqa: E402
from nemo_prorl.lifecycle.run_records import RecordsState  # noqa: E402
from nemo_prorl.lifecycle.summary import RunSummary  # noqa: E402
from nemo_prorl.lifecycle.validation import ValidationState  # noqa: E402
from nemo_prorl.rewards.interface import RewardRequest, Verdict  # noqa: E402
from nemo_prorl.rollout.collector import CollectorState  # noqa: E402
from nemo_prorl.schema import METRICS, Constraint, Count, Sha256  # noqa: E402
from nemo_prorl.service import EngineEndpoint, RewardEndpoint  # noqa: E402
from nemo_prorl.tracing import Timeline  # noqa: E402
from nemo_prorl.trainer import ProgressState  # noqa: E402
from nemo_prorl.usage import NodeUsage  # noqa: E402

FOLDER = ROOT / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


class RunState(typing.TypedDict):
    """The state of a run, apart from its tensors; written by prorl train."""

    format: Literal[5]
    """version of the checkpoint format"""
    weights_sha256: Sha256
    """hash of the policy's weights"""
    reference_sha256: Sha256
    """hash of the reference policy's weights"""
    step: Count
    stage: str
    """name of the stage of a chain; "none" for a run without stages"""
    version: str
    """version of nemo_prorl that wrote the checkpoint"""
    code: Sha256
    """sha256 over the package's Python files"""
    functions: dict[str, str]
    """code of the user's reward functions, loss and advantage: sha256 by file, version by installed package"""
    files: dict[str, Sha256]
    """sha256 of each file beside state.json that contains groups"""
    trainer: ProgressState
    records: RecordsState
    validation: ValidationState
    resets: ResetsState
    prompts: BlendState
    rollouts: CollectorState
    entropy: EntropyState


def verdict() -> Any:
    """Return the type of a verdict, with the rule that its score is null exactly if its failure is "infrastructure"."""
    failed = {"properties": {"failure": {"const": "infrastructure"}}}
    unscored = {"properties": {"score": {"type": "null"}, "correct": {"type": "null"}}}
    score = {"type": "number", "minimum": 0, "maximum": 1}
    judged = {"properties": {"score": score, "failure": {"enum": [None, "timeout", "invalid"]}}}
    return Annotated[Verdict, Constraint(**{"if": failed, "then": unscored, "else": judged})]


def any_of(kinds: Any, description: str) -> Any:
    return Annotated[kinds, Constraint(description=description)]


LAUNCH: Any = launcher.LaunchBegin | launcher.LaunchEnd

# name: (title, type, whether unknown fields are accepted)
FORMATS: dict[str, tuple[str, Any, bool]] = {
    "chain": ("chain.json", launcher.ChainRecord, False),
    "control-request": ("Request to a run", Request, False),
    "data-manifest": ("manifest.json of a prepared folder", PreparedManifest, False),
    "endpoint": ("Endpoint file", any_of(RewardEndpoint | EngineEndpoint, "The address of a run's service."), False),
    "evaluation-comparison": ("comparison.json", evaluation.EvaluationComparison, False),
    "evaluation-manifest": ("manifest.json of an evaluation", evaluation.EvaluationManifest, False),
    "evaluation-published": ("published.json", evaluation.PublishedComparison, False),
    "evaluation-results": ("results.json", evaluation.EvaluationResults, False),
    "evaluation-sample": ("Line of samples/BENCHMARK.jsonl", evaluation.EvaluationSample, False),
    "fork": ("fork.json", launcher.ForkRecord, False),
    "hook-event": ("Event passed to on_event", launcher.HookEvent, False),
    "journal-event": ("Line of journal.jsonl", any_of(JournalEvent, "An event of a run."), True),
    "launch": ("Line of launches.jsonl", any_of(LAUNCH, "A start of a run by a Slurm job, or its end."), False),
    "node": (
        "Node file",
        any_of(NodeState | Launch, "The state of a node, or the start parameters, of a run on several nodes."),
        False,
    ),
    "prompt-record": ("Prompt record", records.PromptRecord, True),
    "reward-request": ("Reward request", RewardRequest, True),
    "state": (
        "state.json of a checkpoint",
        any_of(ImportedState | RunState, "The state of a run or of an imported model, apart from its tensors."),
        False,
    ),
    "summary": ("summary.json", RunSummary, False),
    "trace": ("Timeline of a step, traces/step-N.json", Timeline, False),
    "usage": ("Sample of a node, endpoints/usage-N.json", NodeUsage, False),
    "verdict": ("Verdict", verdict(), False),
}


def schema_of(kind: Any, is_open: bool) -> dict[str, Any]:
    """Return the JSON schema of the type `kind`, with the definitions of the types that it contains in `$defs`.

    Args:
        is_open: accept unknown fields.
    """
    config = ConfigDict(use_attribute_docstrings=True, extra="ignore" if is_open else "forbid")
    # A list, because pydantic accepts no config for a class that can have one itself.
    whole = TypeAdapter(list[kind], config=config).json_schema()
    schema, definitions = whole["items"], whole.get("$defs", {})
    if "$ref" in schema:
        schema = {**definitions.pop(schema.pop("$ref").rpartition("/")[2]), **schema}
    return without_titles({**schema, **({"$defs": definitions} if definitions else {})})


def without_titles(schema: Any, is_map: bool = False) -> Any:
    """Return the schema without the titles that pydantic adds, because they repeat the names.

    Args:
        is_map: the keys of `schema` are names of fields or definitions, so a key `title` is kept.
    """
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_titles(value, key in ("properties", "$defs", "patternProperties"))
        for key, value in schema.items()
        if is_map or key != "title"
    }


def metrics_line() -> dict[str, Any]:
    number = {"type": ["number", "null"]}
    return {
        "description": "One training step.  A number that is not finite is null.",
        "type": "object",
        "required": ["step", "stage", "time/step"],
        "properties": {"step": {"type": "integer", "minimum": 1}, "stage": {"type": "string"}},
        "patternProperties": {
            f"^{prefix and prefix + '/'}({'|'.join(names.split())})$".replace("TASK", "[^/]+"): number
            for prefix, names in METRICS.items()
        },
        "additionalProperties": False,
    }


def prompt_record() -> dict[str, Any]:
    """Return the schema of a prompt record, with a schema of `truth` for each known task."""
    schema = schema_of(FORMATS["prompt-record"][1], is_open=True)
    definitions = schema.pop("$defs")
    schema["allOf"] = []
    for task, forms in records.TRUTHS.items():
        found = schema_of(Union[tuple(forms.values())], is_open=True)
        definitions |= found.pop("$defs", {})
        then = {"properties": {"truth": found}}
        schema["allOf"].append({"if": {"properties": {"task": {"const": task}}, "required": ["task"]}, "then": then})
    return {**schema, "$defs": definitions}


def texts() -> dict[Path, str]:
    """Return {path: text} of all schema files."""
    schemas = {name: (title, schema_of(kind, is_open)) for name, (title, kind, is_open) in FORMATS.items()}
    schemas["prompt-record"] = (FORMATS["prompt-record"][0], prompt_record())
    schemas["metrics"] = ("Line of metrics.jsonl", metrics_line())
    return {
        FOLDER / f"{name}.schema.json": json.dumps({"$schema": DIALECT, "title": title, **schema}, indent=1) + "\n"
        for name, (title, schema) in sorted(schemas.items())
    }


def main() -> int:
    stale = {path: text for path, text in texts().items() if not path.is_file() or path.read_text() != text}
    check = "--check" in sys.argv[1:]
    for path, text in stale.items():
        if not check:
            path.write_text(text)
        sys.stdout.write(
            f"{path.relative_to(ROOT)} {'is out of date. Fix: python setup/schemas.py' if check else 'written'}\n"
        )
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
