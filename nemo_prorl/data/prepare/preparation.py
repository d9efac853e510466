"""The preparation of a data set: reads the source, drops unusable rows, and writes the output folder."""

import json
import logging
import random
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_prorl import __version__
from nemo_prorl.data import hub
from nemo_prorl.data.prepare import agreement, answers, filters, gold, output, puzzles
from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.inputs import (
    HUB,
    PrepareOptions,
    generator,
    name_in,
    patterns_of,
    source_files,
    tasks_file_of,
)
from nemo_prorl.data.prepare.manifest import Checks, HubSource, InputFile, PreparedManifest, RecordCounts
from nemo_prorl.data.prepare.oracle import Oracles
from nemo_prorl.data.prepare.output import Part
from nemo_prorl.data.prepare.rows import Row, read_rows, sha256_of
from nemo_prorl.data.prepare.sources import ALL
from nemo_prorl.data.records import PromptRecord, as_messages, validate_record
from nemo_prorl.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

_EXAMPLES = 5  # answers that a warning names


@dataclass(frozen=True)
class Item:
    """A draft with its record and its place in the source.

    `part`: train or validation if the puzzles are generated for this part; None if the part is drawn later.
    """

    file: str
    line: int
    draft: Draft
    record: PromptRecord
    part: Part | None = None


class Preparation:
    """The state of a preparation: kept items, dropped rows with their reasons, and entries of the manifest."""

    def __init__(self, options: PrepareOptions) -> None:
        self.options = options
        self.read = 0
        self.items: list[Item] = []
        self.dropped: list[dict[str, Any]] = []
        self.origin, self.hub, self.inputs = "", HubSource(), list[InputFile]()
        self.checks: Checks = {"gold": {"checked": 0, "failed": 0, "without": 0}}
        self._oracles = Oracles(options.unsafe_no_sandbox)
        self._wanted = options.source.selection() if options.source.selection else None

    @property
    def own_task(self) -> bool:
        """Tell whether the records get another task than the source's; then its plugin and its form do not apply."""
        return self.options.task not in (None, self.options.source.task)

    # --- reading ---------------------------------------------------------------------------------------------------

    def read_source(self) -> None:
        """Read all rows as drafts with records.  Raises DataError that names file, line and field of an invalid row."""
        try:
            self._read_source()
        finally:
            self._oracles.close()
        if self._oracles.counts["tests"]:
            self.checks["expected"] = self._oracles.counts

    def _read_source(self) -> None:
        opts, source = self.options, self.options.source
        if (tasks_file := tasks_file_of(opts)) is not None:
            self._make(tasks_file)
            return
        if opts.origin is None:
            raise ConfigError(f"--from is missing; expected the file or folder of {source.name}, or 'hub'")
        self.origin = opts.origin
        if opts.origin == HUB:
            folder, self.hub = self._download()
        else:
            folder = Path(opts.origin)
        for file in source_files(opts, folder):
            before = self.read
            self._read_file(file)
            self.inputs.append({"file": name_in(folder, file), "sha256": sha256_of(file), "rows": self.read - before})

    def _download(self) -> tuple[Path, HubSource]:
        opts, source = self.options, self.options.source
        if not source.repo:
            raise ConfigError(f"--from hub: {source.name} is not on the hub; expected a file or a folder")
        revision = opts.revision or source.revision or output.recorded_commit(opts.out, source.repo)
        alone = f"prorl data prepare {source.name}{f' --only {opts.only}' if opts.only else ''}"
        alone += f" --from FOLDER/{source.name} --out {shlex.quote(str(opts.out))}"
        goes_on = opts.goes_on or alone
        folder, commit = hub.download(source.repo, patterns_of(opts), revision, f"FOLDER/{source.name}", goes_on)
        return folder, {"repo": source.repo, "commit": commit}

    def _read_file(self, file: Path) -> None:
        opts, column = self.options, self.options.source.part_column
        for row in read_rows(file, opts.columns):
            if opts.limit is not None and self.read >= opts.limit:
                return
            if opts.only and column and row.needed(column) != opts.only:
                continue
            if self._wanted is not None and not self._wanted(row):
                continue
            drafted = self._outside(row) or opts.source.convert(row)
            if isinstance(drafted, Draft):
                drafted = self._with_columns(drafted, row)
            self._add(str(file), row.line, drafted, f"{opts.name}-{self.read}", None)

    def _with_columns(self, draft: Draft, row: Row) -> Draft:
        """Return the draft with the columns of --keep and --target."""
        target, kept = self.options.target, {}
        if target and (response := str(row.column(f"--target {target}", target) or "").strip()):
            draft = replace(draft, meta={**draft.meta, "target": response})
        for name in self.options.keep:
            value = row.column(f"--keep {name}", name)
            if name in (draft.truth if self.own_task else draft.meta):
                raise ConfigError(f"--keep {name}: the records have a field of this name.  Fix: rename the column")
            kept[name] = json.loads(json.dumps(value, default=str))  # Parquet has values that JSON does not have
        if self.own_task:
            return replace(draft, truth={**draft.truth, **kept})
        return replace(draft, meta={**draft.meta, **kept})

    def _outside(self, row: Row) -> Drop | None:
        """Return a Drop for a row before --since or after --until."""
        opts, source = self.options, self.options.source
        if not source.date_column:
            return None
        since, until = opts.since or source.since, opts.until or source.until
        date = row.text(source.date_column)[:10]
        if (since and date < since) or (until and date > until):
            return Drop("outside the period", f"{source.date_column} is {date}")
        return None

    def _make(self, tasks_file: Path) -> None:
        opts = self.options
        tasks = puzzles.read_tasks(tasks_file)
        if opts.only:
            if opts.only not in tasks:
                raise ConfigError(f"--only {opts.only}: {tasks_file.name} has no such task; it has: {', '.join(tasks)}")
            tasks = {opts.only: tasks[opts.only]}
        size = (opts.source.size or 0) if opts.size is None else opts.size
        holdout = self._holdout()
        if holdout == ALL:
            raise ConfigError(
                "--holdout all: expected a number, because any number of puzzles can be generated.  Fix: --holdout N"
                " --size 0 generates validation puzzles only"
            )
        train, held = puzzles.make(tasks, size, holdout, opts.seed, opts.workers)
        made: list[tuple[Part, list[Draft | Drop]]] = [("train", train), ("validation", held)]
        for part, drafts in made:
            prefix = opts.name if part == "train" else f"{opts.name}-heldout"
            for number, drafted in enumerate(drafts, 1):
                suffix = drafted.row_id if isinstance(drafted, Draft) else str(number)
                self._add(f"{part} of {tasks_file.name}", number, drafted, f"{prefix}-{suffix}", part)
        self.origin = generator()
        self.inputs = [{"file": tasks_file.name, "sha256": sha256_of(tasks_file), "rows": len(train) + len(held)}]

    def _holdout(self) -> int:
        opts = self.options
        if opts.holdout is not None:
            return opts.holdout
        from_file = opts.source.size is not None and tasks_file_of(opts) is None
        return 0 if from_file else opts.source.holdout

    def _add(self, file: str, line: int, drafted: Draft | Drop, identity: str, part: Part | None) -> None:
        self.read += 1
        if isinstance(drafted, Draft) and drafted.oracle:
            drafted = self._oracles.with_expected(drafted)
        if isinstance(drafted, Drop):
            self._drop(file, line, drafted)
            return
        text = drafted.question if self.own_task else drafted.prompt_text
        meta = dict(drafted.meta) | ({"row": drafted.row_id} if drafted.row_id else {})
        record: PromptRecord = {
            "id": identity,
            "task": self.options.task or drafted.task,
            "prompt": as_messages(text) if self.options.prompt == "messages" else text,
            "truth": drafted.truth,
            "source": self.options.source.name,
            "meta": meta,
        }
        if drafted.truth:  # otherwise the judge still has to read it
            validate_record(record, f"{file}:{line}")
        self.items.append(Item(file, line, drafted, record, part))

    # --- dropping --------------------------------------------------------------------------------------------------

    def _drop(self, file: str, line: int, drop: Drop) -> None:
        self.dropped.append({"file": file, "line": line, "reason": drop.reason, "detail": drop.detail})

    def _drop_where(self, drops: Iterator[Drop | None]) -> None:
        """Drop the items with a reason in `drops`, which has one entry per item; None keeps the item."""
        kept = []
        for item, drop in zip(self.items, drops, strict=True):
            if drop is None:
                kept.append(item)
            else:
                self._drop(item.file, item.line, drop)
        self.items = kept

    def _truth_fault(self) -> Callable[[dict[str, Any]], str | None]:
        """Return the function that says why the plugin refuses a truth; none is refused for the user's own task."""
        return (lambda _: None) if self.own_task else gold.Truths(self.options.source.task).fault

    def drop_invalid_truths(self) -> None:
        """Drop what the plugin refuses.  An empty truth, of a row without a boxed answer, waits for the judge."""
        fault_of = self._truth_fault()

        def why(truth: dict[str, Any]) -> Drop | None:
            if not truth and self.options.source.judged:
                return None if self.options.judge else Drop("no answer", "R1's response has nothing in \\boxed{}")
            return Drop("refused by the plugin", fault) if (fault := fault_of(truth)) else None

        self._drop_where(why(item.draft.truth) for item in self.items)

    def drop_duplicates(self) -> None:
        """Keep the first of equal problems; a validation problem has priority over a training problem."""
        first: dict[str, Item] = {}
        for item in sorted(self.items, key=lambda item: item.part != "validation"):
            first.setdefault(" ".join(item.draft.question.split()), item)

        def why(item: Item) -> Drop | None:
            other = first[" ".join(item.draft.question.split())]
            return None if other is item else Drop("duplicate", f"of {other.file}:{other.line}")

        self._drop_where(why(item) for item in self.items)

    def drop_contaminated(self) -> None:
        if not self.options.against:
            return
        sets = filters.Contamination(self.options.ngram, self.options.overlap)
        for path in self.options.against:
            sets.add(path)
        # Puzzles generated for validation are not training prompts: some of the sets may hold the same puzzles.
        hits = [None if item.part == "validation" else sets.find(item.draft.question) for item in self.items]
        self._drop_where(
            None if hit is None else Drop("contaminated", f"{hit.where}: {hit.share:.0%} in common: {hit.words}")
            for hit in hits
        )
        self.checks["contamination"] = {
            "ngram": sets.ngram,
            "overlap": sets.share,
            "ngram_only": sets.doubts,
            "template_ngrams": sets.template,
            "against": [
                {
                    "file": f"{file.parent.name}/{file.name}",
                    "sha256": sha256_of(file),
                    "rows": rows,
                    "dropped": sum(hit is not None and hit.where.startswith(f"{file}:") for hit in hits),
                }
                for file, rows in sets.files
            ],
        }

    def drop_long(self) -> None:
        most, folder = self.options.max_prompt_tokens, self.options.tokenizer
        if most is None or folder is None:
            return
        counted = filters.token_lengths([item.record for item in self.items], folder)
        self._drop_where(Drop("too long", f"{count} tokens") if count > most else None for count in counted)
        longest = max((count for count in counted if count <= most), default=0)
        self.checks["length"] = {
            "max_prompt_tokens": most,
            "longest_kept": longest,
            "tokenizer_sha256": sha256_of(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else None,
        }

    def drop_disagreeing(self) -> None:
        """Keep the items whose two solutions agree; the judge also reads the answers that become their truths."""
        opts = self.options
        if not opts.source.judged or opts.agreement == "none":
            return
        drafts = [item.draft for item in self.items]
        if opts.judge is None:
            records = [item.record for item in self.items]
            outcome = agreement.graded(drafts, records, opts.workers, opts.unsafe_no_sandbox)
        else:
            valid = self._truth_fault()
            outcome = agreement.judged(
                drafts, opts.judge, cache=opts.out / output.CACHE, fault_of=valid, size=opts.size, seed=opts.seed
            )
        self.checks["agreement"] = outcome.check
        self._drop_where(result if isinstance(result, Drop) else None for result in outcome.results)
        kept = [result for result in outcome.results if isinstance(result, Draft)]
        self.items = [
            replace(item, draft=draft, record={**item.record, "truth": draft.truth})
            for item, draft in zip(self.items, kept, strict=True)
        ]

    def drop_beyond_size(self) -> None:
        """Keep a random choice of --size items, fixed by the seed, in the source's order."""
        size = self.options.size
        if size is None or size >= len(self.items) or any(item.part for item in self.items):
            return
        chosen = set(random.Random(f"{self.options.seed}/size").sample(range(len(self.items)), size))
        self._drop_where(None if at in chosen else Drop("beyond --size") for at in range(len(self.items)))

    def drop_worded(self) -> None:
        """Leave out the mathematical answers in ordinary words, with --drop-worded."""
        if self.options.drop_worded and self.options.source.task == "math":
            self._drop_where(
                Drop("answer in words") if answers.is_worded(item.draft.truth) else None for item in self.items
            )

    def warn_of_answers(self) -> None:
        """Name the mathematical answers that the plugin may read otherwise than they are meant."""
        if self.options.source.task != "math":
            return
        for doubted, text in answers.DOUBTS.items():
            if items := [item for item in self.items if doubted(item.draft.truth)]:
                examples = [f"{item.draft.truth['answer']!r} ({item.file}:{item.line})" for item in items[:_EXAMPLES]]
                _log.warning("%d of the answers %s", len(items), text.format(", ".join(examples)))

    def drop_wrong_golds(self) -> None:
        """Drop records whose gold answer the plugin does not accept; judge at most --check of them."""
        opts = self.options
        have = [at for at, item in enumerate(self.items) if item.draft.gold is not None]
        chosen = [have[at] for at in gold.spread(len(have), opts.check)]
        records = [self.items[at].record for at in chosen]
        golds = [str(self.items[at].draft.gold) for at in chosen]
        failures = gold.failures(records, golds, opts.workers, opts.unsafe_no_sandbox)
        wrong = {chosen[at]: reason for at, reason in failures.items()}
        self.checks["gold"] = {
            "checked": len(chosen),
            "failed": len(wrong),
            "without": len(self.items) - len(have),
        }
        self._drop_where(
            Drop("gold answer not accepted", wrong[at]) if at in wrong else None for at in range(len(self.items))
        )
        if wrong and len(chosen) < len(have):
            _log.warning(
                "%d of %d judged gold answers scored less than 1 and are dropped; %d others were not judged.  Fix:"
                " --check all",
                len(wrong),
                len(chosen),
                len(have) - len(chosen),
            )

    # --- writing ---------------------------------------------------------------------------------------------------

    def parts(self) -> dict[Part, list[PromptRecord]]:
        """Return the records of train and validation; leave out a part without records."""
        opts, held = self.options, set()
        if all(item.part is None for item in self.items):
            holdout = self._holdout()
            wanted = len(self.items) if holdout == ALL else holdout
            if holdout != ALL and wanted >= len(self.items):
                raise ConfigError(
                    f"--holdout {wanted}: only {len(self.items)} records are left, and some must remain to train on."
                    "  Fix: a smaller number; or all, for validation only"
                )
            held = set(random.Random(f"{opts.seed}/holdout").sample(range(len(self.items)), wanted))
        parts: dict[Part, list[PromptRecord]] = {"train": [], "validation": []}
        for at, item in enumerate(self.items):
            parts[item.part or ("validation" if at in held else "train")].append(item.record)
        return {part: records for part, records in parts.items() if records}

    def write(self, command: Sequence[str]) -> PreparedManifest:
        opts = self.options
        reasons = Counter(drop["reason"] for drop in self.dropped)
        if not self.items:
            cause = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common()) or "the source is empty"
            raise DataError(f"{opts.origin or opts.source.name}: no record is left of {self.read} rows: {cause}")
        parts = self.parts()
        counts: RecordCounts = {"read": self.read, "kept": len(self.items), "dropped": dict(sorted(reasons.items()))}
        for part, records in parts.items():
            counts[part] = len(records)
        outputs = output.write_records(opts.out, parts, self.dropped, opts.form)
        manifest: PreparedManifest = {
            "format": 1,
            "source": opts.source.name,
            "task": opts.task or opts.source.task,
            "licence": opts.licence or opts.source.licence,
            "command": list(command),
            "version": __version__,
            "from": self.origin,
            **self.hub,
            "inputs": self.inputs,
            "counts": counts,
            "checks": self.checks,
            "outputs": outputs,
        }
        output.write_manifest(opts.out, manifest)
        return manifest


def _filtered(options: PrepareOptions) -> Preparation:
    """Return the preparation after reading and after the filters that cost no request and no reward worker."""
    output.check_folder(options.out, options.source.name)
    job = Preparation(options)
    job.read_source()
    _log.info("read %d rows; made a record from %d of them", job.read, len(job.items))
    job.drop_invalid_truths()
    if not job.own_task:
        job.drop_worded()
        job.warn_of_answers()
    job.drop_duplicates()
    job.drop_contaminated()
    job.drop_long()
    return job


def prepare(options: PrepareOptions, command: Sequence[str]) -> PreparedManifest:
    """Prepare a data set and return the manifest.  Cheap filters run first, a judge and the reward service last."""
    job = _filtered(options)
    job.drop_disagreeing()
    job.drop_beyond_size()
    if not job.own_task:
        job.drop_wrong_golds()
    return job.write(command)


def estimate(options: PrepareOptions) -> str:
    """Return what the judge would cost, without a request.  Raises ConfigError if no judge is needed."""
    if options.judge is None:
        raise ConfigError("--estimate: is for --agreement judge (scp-116k); nothing else has a cost")
    drafts = [item.draft for item in _filtered(options).items]
    return agreement.estimate(drafts, options.judge, options.out / output.CACHE, options.size) + "\n"


def summary(options: PrepareOptions, manifest: PreparedManifest) -> str:
    """Return the output of the command: counts, files, and the configuration keys that use them."""
    counts = manifest["counts"]
    lines = [f"{options.name}: {counts['read']} read, {counts['kept']} kept"]
    lines += [f"  dropped {number:>7}  {reason}" for reason, number in counts["dropped"].items()]
    checked = manifest["checks"]["gold"]
    lines.append(f"  gold answers: {checked['checked']} judged as responses, {checked['failed']} not accepted")
    for written in manifest["outputs"]:
        path = options.out / written["file"]
        part = "train" if path.stem == "train" else "validation"
        override = shlex.quote(f"data.{part}=[{{name: {options.name}, path: {path}}}]")
        lines.append(f"{path}: {written['records']} records; {override}")
    return "\n".join(lines) + "\n"
