"""What hostile programs have taught about the sandbox, one by one."""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_prorl.rewards.interface import Program
from nemo_prorl.rewards.sandbox import client, levels, zygote
from nemo_prorl.rewards.sandbox.client import ProcessSandbox, SandboxFailure

pytestmark = pytest.mark.starts


@pytest.fixture(scope="module", params=levels.LEVELS)
def box(request: pytest.FixtureRequest) -> Iterator[ProcessSandbox]:
    sandbox = ProcessSandbox(request.param)
    try:
        sandbox.start()
    except SandboxFailure as error:
        pytest.skip(f"this machine has no such level: {error}")
    yield sandbox
    sandbox.close()


def test_a_process_of_the_host_cannot_be_found_by_its_number(box: ProcessSandbox) -> None:
    ways = ("os.getpgid(pid)", "os.getsid(pid)", "os.getpriority(0, pid)", "time.clock_gettime((~pid << 3) | 2)")
    source = (
        "import os, time\nway, pid = input().split(';')\npid = int(pid)\n"
        "try:\n    eval(way)\n    print('found')\nexcept OSError as error:\n    print(error.errno)\n"
    )
    run = box.run(Program(source, "stdin", tuple(f"{way};{os.getpid()}" for way in ways)), lambda *_: True)
    refused = {str(number).encode() for number in (errno.EPERM, errno.ESRCH, errno.EINVAL)}
    assert {output and output.strip() for output in run.outputs} <= refused


def test_own_clocks_and_groups_can_be_asked_for(box: ProcessSandbox) -> None:
    source = "import os, time\nos.getsid(0), os.getpgid(os.getpid()), os.getpriority(0, 0)\n" + (
        "for clock in (0, 1, 2, 3, 4, 7):\n    time.clock_gettime(clock)\nprint('fine')\n"
    )
    assert box.run(Program(source, "stdin", ("",)), lambda *_: True).outputs == (b"fine\n",)


def test_a_report_of_many_lines_is_read_at_once() -> None:
    child = client._Child(0, None, 0.0, 0.0)
    began = time.process_time()
    client._read_report(child, b"\n" * (8 << 20), 0, 10)
    assert time.process_time() - began < 5.0  # line by line it takes 15 s


def test_what_hides_from_being_counted_counts_as_too_much(tmp_path: Path) -> None:
    assert not zygote._exceeds_disk(str(tmp_path), 1 << 20)
    descend = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(25):
            os.mkdir("d" * 200)
            os.chdir("d" * 200)
    finally:
        os.chdir(descend)
    assert zygote._exceeds_disk(str(tmp_path), 1 << 20)
    zygote.empty_folder(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_an_emptied_folder_bears_no_mark(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f".moved-{number}" / "x").mkdir(parents=True)
    os.utime(tmp_path, (123, 456))
    tmp_path.chmod(0o711)
    zygote.empty_folder(str(tmp_path))
    status = tmp_path.stat()
    assert (status.st_mode & 0o7777, status.st_mtime, status.st_atime) == (0o700, 0, 0)
    assert not list(tmp_path.iterdir())


def test_repeats_take_what_time_the_tests_left(box: ProcessSandbox) -> None:
    """Six tests of 0.5 s, of which five are right only alone: 2.5 s more, within the limit and a half."""
    source = "import heapq, time\ntime.sleep(0.5)\nprint(getattr(heapq, 'again', 0))\nheapq.again = 1\n"
    program = Program(source, "stdin", ("",) * 6, time_limit_s=5.0)
    run = box.run(program, lambda _, output: output == b"0\n")
    assert run.outputs == (b"0\n",) * 6


def test_large_outputs_that_are_wrong_are_not_kept(box: ProcessSandbox) -> None:
    program = Program("print('x' * (3 << 20))", "stdin", ("1", "2"), output_mb=16)
    assert box.run(program, lambda *_: False).outputs == (None, None)
    assert [len(output or b"") for output in box.run(program, lambda *_: True).outputs] == [(3 << 20) + 1] * 2
