"""The display of a run, on a terminal and in the file of a Slurm job."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_prorl.config import Config
from nemo_prorl.launcher.progress import Progress

LINES = [
    "2026-11-28 19:45:50,965 WARNING nemo_prorl.rollout.engines: engine-3 failed",
    "2026-11-28 19:45:51,002 INFO nemo_prorl.rank: the model is built",
    "[NeMo W 2026-11-28 19:45:52 nemo_logging:349] a line of NeMo",
]


@pytest.mark.parametrize(("terminal", "time"), [(False, "2026-11-28 19:45:50 "), (True, "")])
def test_warnings_have_their_time_in_a_file(
    terminal: bool, time: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    progress = Progress(OmegaConf.structured(Config), tmp_path)
    capsys.readouterr()
    for line in LINES:
        progress.line(line)
    shown = capsys.readouterr().err.replace("\r\033[K", "")
    assert shown == f"{time}WARNING: engine-3 failed\nthe model is built\n"
