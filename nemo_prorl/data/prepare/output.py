"""Writing of a prepared folder: a file under its final name is always complete, and the manifest is written last."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from nemo_prorl.data import parquet
from nemo_prorl.data.prepare.manifest import OutputFile, PreparedManifest
from nemo_prorl.data.prepare.rows import sha256_of
from nemo_prorl.data.records import PromptRecord
from nemo_prorl.errors import ConfigError
from nemo_prorl.files import TEMPORARY, new_file, read_object, write_json

MANIFEST = "manifest.json"
CACHE = "judge-cache.jsonl"
Part = Literal["train", "validation"]
PARTS: tuple[Part, ...] = get_args(Part)


def check_folder(out: Path, source: str) -> None:
    """Raise ConfigError if the folder contains anything but an earlier preparation of this source."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file; expected a folder")
    if not out.is_dir():
        return
    manifest = out / MANIFEST
    ours = {MANIFEST, CACHE, "dropped.jsonl", *(f"{part}.{form}" for part in PARTS for form in ("jsonl", "parquet"))}
    temporary = re.compile(r"(\.\d+)?\.tmp$")
    foreign = [path.name for path in out.iterdir() if temporary.sub("", path.name) not in ours]
    if foreign:
        raise ConfigError(f"--out {out}: contains other files ({sorted(foreign)[0]}).  Fix: use a new or empty folder")
    if not manifest.is_file():
        return
    try:
        prepared = json.loads(manifest.read_text())["source"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--out {out}: {MANIFEST} is not from this command ({error}).  Fix: use another folder"
        ) from error
    if prepared != source:
        raise ConfigError(f"--out {out}: contains data of {prepared!r}.  Fix: use another folder for {source!r}")


def recorded_commit(out: Path, repo: str) -> str | None:
    """Return the commit of the hub that the folder was prepared from; None if it was not prepared from `repo`."""
    manifest = read_object(out / MANIFEST) or {}
    return manifest.get("commit") if manifest.get("repo") == repo else None


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_records(
    out: Path, parts: Mapping[Part, Sequence[PromptRecord]], dropped: Sequence[Mapping[str, Any]], form: str
) -> list[OutputFile]:
    """Replace the files of an earlier preparation; return the new files with their hashes."""
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)  # a folder without a manifest counts as incomplete
    for unfinished in out.glob(f"*{TEMPORARY}"):  # of a preparation that was killed
        unfinished.unlink()
    for part in PARTS:
        for old in ("jsonl", "parquet"):
            (out / f"{part}.{old}").unlink(missing_ok=True)
    outputs: list[OutputFile] = []
    for part, records in parts.items():
        path = out / f"{part}.{form}"
        with new_file(path, sync=True) as temporary:
            (parquet.write_records if form == "parquet" else _write_lines)(temporary, records)
        outputs.append({"file": path.name, "records": len(records), "sha256": sha256_of(path)})
    with new_file(out / "dropped.jsonl", sync=True) as temporary:
        _write_lines(temporary, dropped)
    return outputs


def write_manifest(out: Path, manifest: PreparedManifest) -> None:
    """Write the manifest, which marks the folder as complete."""
    write_json(out / MANIFEST, manifest, sync=True)
