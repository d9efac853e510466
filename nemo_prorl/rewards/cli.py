"""The commands `prorl rewards list | describe | new | test | score | serve`.

Results are written to standard output, messages to standard error.
"""

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from nemo_prorl.config import RewardsConfig
from nemo_prorl.errors import ConfigError, DataError, RewardFailure
from nemo_prorl.rewards.discovery import discover, make_plugin
from nemo_prorl.rewards.functions import settings_of, with_absolute_paths
from nemo_prorl.rewards.interface import RewardRequest
from nemo_prorl.rewards.judging import RewardService, pool_specs
from nemo_prorl.rewards.options import (
    add_server_arguments,
    add_settings,
    add_unsafe,
    opened,
    printable,
    read_line,
    read_lines,
)

_log = logging.getLogger(__name__)

_FUNCTIONS = "rewards.functions."
_TIME = "rewards.functions_time_s"


def add_parser(subparsers: Any) -> None:
    """Add the command `rewards` with its subcommands to the main command line."""
    parser = subparsers.add_parser("rewards", help="list, describe, test and serve reward plugins")
    commands = parser.add_subparsers(dest="rewards_command", required=True, metavar="COMMAND")
    list_parser = commands.add_parser("list", help="list the installed plugins, broken ones included")
    list_parser.add_argument("--json", action="store_true", help="print one JSON object per plugin")
    describe_parser = commands.add_parser("describe", help="show tasks, time budget and settings of a plugin")
    describe_parser.add_argument("name", metavar="NAME", help="name of the plugin")
    new_parser = commands.add_parser("new", help="write a project for a new plugin: code, tests, prompt records")
    name = "name of the plugin and of its task: lower-case letters, digits, underscores"
    new_parser.add_argument("name", metavar="NAME", help=name)
    new_parser.add_argument("--dir", type=Path, help="folder to write; default: ./NAME")
    new_parser.add_argument("--sandbox", action="store_true", help="make a plugin that runs model-written code")
    test_parser = commands.add_parser("test", help="run the conformance kit, which every plugin must pass")
    test_parser.add_argument("name", metavar="NAME", help="name of the plugin")
    examples = "JSON Lines file with the fields truth, good and bad; default: the examples of the plugin"
    test_parser.add_argument("--examples", type=Path, help=examples)
    add_settings(test_parser)
    test_parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    score_parser = commands.add_parser("score", help="judge requests (JSON Lines) and write verdicts in the same order")
    functions = (
        f"rewards.functions.TASK=FILE.py:FUNCTION: a reward function of your own, as for prorl train; and its {_TIME}"
    )
    score_parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", default=[], help=functions)
    score_parser.add_argument("--in", dest="source", default="-", help="file of requests; default: -, standard input")
    score_parser.add_argument("--out", default="-", help="file of verdicts; default: -, standard output")
    workers = "worker processes, divided among the plugins; per plugin with --in -; default: 1"
    score_parser.add_argument("--workers", type=int, default=1, help=workers)
    add_settings(score_parser)
    add_unsafe(score_parser)
    serve_parser = commands.add_parser("serve", help="run the reward server until it is stopped")
    add_server_arguments(serve_parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand and return its exit code.  A failure raises a ProrlError, which has the `exit_code`."""
    if args.rewards_command == "list":
        return _list(args.json)
    if args.rewards_command == "describe":
        return _describe(args.name)
    if args.rewards_command == "new":
        from nemo_prorl.rewards.scaffold import new_plugin

        _write(sys.stdout, new_plugin(args.name, args.dir or Path(args.name), args.sandbox))
        return 0
    if args.rewards_command == "test":
        return _test(args)
    if args.rewards_command == "score":
        return asyncio.run(_score(args))
    from nemo_prorl.rewards import server  # here, because the imports of starlette and uvicorn are slow

    return asyncio.run(server.serve(args))


def _write(out: TextIO, text: str) -> None:
    out.write(text + "\n")
    out.flush()


def _list(as_json: bool) -> int:
    registry = discover()
    seconds = registry.seconds()
    for name, plugin in sorted(registry.plugins.items()):
        budget_s = make_plugin(plugin).time_budget_s
        row = {"name": name, "tasks": list(plugin.tasks), "time_budget_s": budget_s}
        row |= {"needs_sandbox": plugin.needs_sandbox, "state": "ok", "second": plugin.second}
        row["second_of"] = next((seconds[task] for task in plugin.tasks if task in seconds), "")
        text = f"{name:<16} {'ok':<8} tasks {', '.join(plugin.tasks)}; {budget_s:g} s per answer"
        text += "; sandboxed" if plugin.needs_sandbox else ""
        text += f"; second verifier: {plugin.second}" if plugin.second else ""
        text += f"; is the second verifier of {row['second_of']}, not for training" if row["second_of"] else ""
        _write(sys.stdout, json.dumps(row) if as_json else text)
    for name, reason in sorted(registry.broken.items()):
        row = {"name": name, "state": "broken", "why": reason}
        _write(sys.stdout, json.dumps(row) if as_json else f"{name:<16} {'broken':<8} {reason}")
    if not registry.plugins and not registry.broken:
        _log.warning("no reward plugin is installed.  Fix: pip install one, for example from reward_plugins/")
    return 0


def _describe(name: str) -> int:
    plugin = discover().plugin(name)
    instance = make_plugin(plugin)
    sandbox = "needs the sandbox" if plugin.needs_sandbox else "does not need the sandbox"
    description = (plugin.__doc__ or "no description").strip().splitlines()[0]
    _write(sys.stdout, f"{name}: {description}")
    _write(sys.stdout, f"  tasks     {', '.join(plugin.tasks)}")
    if plugin.second:
        _write(sys.stdout, f"  second    a sample of the responses is judged again as task {plugin.second}")
    _write(sys.stdout, f"  budget    {instance.time_budget_s:g} s of CPU time per answer; {sandbox}")
    _write(sys.stdout, f"  code      {plugin.__module__}:{plugin.__qualname__}")
    for field in dataclasses.fields(plugin.Config):
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        default = getattr(instance.config, field.name)
        _write(sys.stdout, f"  setting   rewards.plugins.{name}.{field.name}: {kind} = {default!r}")
    if plugin.needs_sandbox:
        packages = [
            package if importlib.util.find_spec(package) else f"{package} (not installed here)"
            for package in instance.sandbox_packages
        ]
        _write(sys.stdout, f"  packages  judged programs may import {', '.join(packages) or 'none'}")
    return 0


def _test(args: argparse.Namespace) -> int:
    """Run the conformance kit; return 1 if a check failed, otherwise 0."""
    from nemo_prorl.rewards.conformance import check_plugin
    from nemo_prorl.rewards.conformance_cases import read_examples

    examples = read_examples(args.examples, discover().plugin(args.name).tasks) if args.examples else None
    if others := sorted(args.settings.keys() - {args.name}):
        raise ConfigError(f"--settings: plugin {others[0]!r} is not tested here; expected only {args.name!r}")
    report = check_plugin(args.name, args.settings.get(args.name, {}), examples)
    if args.json:
        _write(sys.stdout, json.dumps(report.to_json()))
    else:
        _write(sys.stdout, printable("\n".join(report.lines())))
    return 1 if report.failed else 0


def _from_stdin() -> Iterator[RewardRequest]:
    """Yield each request once its line is read.  Raises DataError, which names the line, if it is not a request."""
    try:
        for number, line in enumerate(iter(sys.stdin.readline, ""), 1):
            if line.strip():
                yield read_line(line, f"standard input:{number}", RewardRequest.from_json)
    except UnicodeDecodeError as error:
        raise DataError(f"standard input: not UTF-8: {error}") from error


def _functions(overrides: list[str]) -> dict[str, str]:
    """Return the reward functions by task.  Raises ConfigError for another override than rewards.functions.TASK."""
    places = {}
    for override in overrides:
        key, _, place = override.partition("=")
        if key == _TIME:
            continue
        if not key.startswith(_FUNCTIONS) or not place:
            raise ConfigError(f"{override}: expected {_FUNCTIONS}TASK=FILE.py:FUNCTION; settings: --settings")
        places[key.removeprefix(_FUNCTIONS)] = with_absolute_paths(place)
    return places


def _seconds(overrides: list[str]) -> float:
    """Return the CPU seconds of a reward function.  Raises ConfigError unless they are a number above 0."""
    values = [override.partition("=")[2] for override in overrides if override.startswith(f"{_TIME}=")]
    text = values[-1] if values else str(RewardsConfig().functions_time_s)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise ConfigError(f"{_TIME}={text}: expected a number of seconds above 0")
    return seconds


async def _score(args: argparse.Namespace) -> int:
    """Judge all requests, log how many have which score, and return 0 if any response has one.

    All requests of a file are checked before a worker starts; a request from standard input is checked once it is read.

    Raises:
        RewardFailure: no response could be judged; the message has the cause for the first.
    """
    streamed = args.source == "-"
    read = [] if streamed else read_lines(Path(args.source), RewardRequest.from_json)
    requests = [request for _, request in read]
    if not streamed and not requests:
        line = "a prompt record with the fields response and finished"
        raise DataError(f"{args.source}: contains no request; each line must be {line}")
    functions, seconds = _functions(args.overrides), _seconds(args.overrides)
    settings = settings_of({"functions": functions, "functions_time_s": seconds, "plugins": args.settings})
    registry = discover(functions=functions)
    tasks = sorted({request.task for request in requests})
    unsafe = args.unsafe_no_sandbox
    specs = pool_specs(registry, tasks, args.workers, settings, unsafe_no_sandbox=unsafe, on_demand=streamed)
    service = RewardService(specs, registry)
    scores: Counter[float | None] = Counter()
    first = ""  # why the first response has no score
    with opened(args.out) as out:
        try:
            if not streamed:
                await service.start()
            source = _from_stdin() if streamed else iter(requests)
            async for _, verdict in service.in_order(source, lambda request: request, args.workers):
                _write(out, json.dumps(verdict))
                scores[verdict["score"]] += 1
                first = first or (verdict["detail"] if verdict["score"] is None else "")
        finally:
            await service.close()
    failed = scores.pop(None, 0)
    if failed and not scores:
        raise RewardFailure(f"none of {failed} responses could be judged; the first: {first}")
    judged, full, none = scores.total(), scores[1.0], scores[0.0]
    _log.info("%d responses: %d score 1, %d score 0, %d between", judged, full, none, judged - full - none)
    if failed:
        _log.warning("%d responses have no score, because their plugin or its worker failed; `detail` says why", failed)
    return 0
