"""`prorl rewards list | describe | new | test | score | serve`.  Results go to standard output, else to stderr."""

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TextIO

from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.rewards.discovery import discover, make_plugin
from nemo_prorl.rewards.interface import RewardRequest
from nemo_prorl.rewards.options import (
    add_server_arguments,
    add_settings,
    add_unsafe,
    opened,
    printable,
    read_line,
    read_lines,
)
from nemo_prorl.rewards.service import RewardService, plan_pools

_log = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    """Adds `rewards` with its own commands to the main command line; `run` takes what it parsed."""
    parser = subparsers.add_parser("rewards", help="list, describe, try and serve reward plugins")
    commands = parser.add_subparsers(dest="rewards_command", required=True, metavar="COMMAND")
    listed = commands.add_parser("list", help="the installed plugins, and those that are broken")
    listed.add_argument("--json", action="store_true", help="one JSON object a line")
    described = commands.add_parser("describe", help="one plugin: tasks, budget, settings")
    described.add_argument("name", metavar="NAME")
    made = commands.add_parser("new", help="write a plugin project to start from: code, tests, data")
    made.add_argument("name", metavar="NAME", help="of the plugin and its task: lower case, digits, underscores")
    made.add_argument("--dir", type=Path, help="the folder to write; default: ./NAME")
    made.add_argument("--sandbox", action="store_true", help="its answers are code: it needs the sandbox")
    tested = commands.add_parser("test", help="the conformance kit: what every plugin must hold")
    tested.add_argument("name", metavar="NAME")
    tested.add_argument("--examples", type=Path, help="JSON Lines of truth, good and bad; default: the plugin's own")
    add_settings(tested)
    tested.add_argument("--json", action="store_true", help="the whole report as one JSON object")
    scored = commands.add_parser("score", help="judge requests (JSON Lines) and write verdicts in their order")
    scored.add_argument("--in", dest="source", default="-", help="file of requests; - is standard input, streamed")
    scored.add_argument("--out", default="-", help="file of verdicts; - is standard output")
    workers = "worker processes, shared out over the plugins; streamed: each one's"
    scored.add_argument("--workers", type=int, default=1, help=workers)
    add_settings(scored)
    add_unsafe(scored)
    served = commands.add_parser("serve", help="run the reward server until it is stopped")
    add_server_arguments(served)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit code.  Raises ProrlError, whose `exit_code` says which."""
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
    from nemo_prorl.rewards import server  # starlette and uvicorn take a while to import

    return asyncio.run(server.serve(args))


def _write(out: TextIO, text: str) -> None:
    out.write(text + "\n")
    out.flush()


def _list(as_json: bool) -> int:
    registry = discover()
    for name, plugin in sorted(registry.plugins.items()):
        made = make_plugin(plugin)
        row = {"name": name, "tasks": list(plugin.tasks), "time_budget_s": made.time_budget_s}
        row |= {"needs_sandbox": plugin.needs_sandbox, "state": "ok"}
        text = f"{name:<16} {'ok':<8} tasks {', '.join(plugin.tasks)}; {made.time_budget_s:g} s an answer"
        text += "; sandboxed" if plugin.needs_sandbox else ""
        _write(sys.stdout, json.dumps(row) if as_json else text)
    for name, why in sorted(registry.broken.items()):
        row = {"name": name, "state": "broken", "why": why}
        _write(sys.stdout, json.dumps(row) if as_json else f"{name:<16} {'broken':<8} {why}")
    if not registry.plugins and not registry.broken:
        _log.warning("no reward plugin is installed; install one, for example from reward_plugins/")
    return 0


def _describe(name: str) -> int:
    plugin = discover().plugin(name)
    made = make_plugin(plugin)
    sandbox = "needs the sandbox" if plugin.needs_sandbox else "needs no sandbox"
    description = (plugin.__doc__ or "no description").strip().splitlines()[0]
    _write(sys.stdout, f"{name}: {description}")
    _write(sys.stdout, f"  tasks     {', '.join(plugin.tasks)}")
    _write(sys.stdout, f"  budget    {made.time_budget_s:g} s of CPU time an answer; {sandbox}")
    _write(sys.stdout, f"  code      {plugin.__module__}:{plugin.__qualname__}")
    for field in dataclasses.fields(plugin.Config):
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        default = getattr(made.config, field.name)
        _write(sys.stdout, f"  setting   rewards.plugins.{name}.{field.name}: {kind} = {default!r}")
    if plugin.needs_sandbox:
        named = made.sandbox_packages
        told = [one if importlib.util.find_spec(one) else f"{one} (not installed here)" for one in named]
        _write(sys.stdout, f"  packages  judged programs may import {', '.join(told) or 'none'}")
    return 0


def _test(args: argparse.Namespace) -> int:
    """0 where no check fails, else 1."""
    from nemo_prorl.rewards.conformance import check_plugin
    from nemo_prorl.rewards.conformance_cases import read_examples

    examples = read_examples(args.examples, discover().plugin(args.name).tasks) if args.examples else None
    if others := sorted(args.settings.keys() - {args.name}):
        raise ConfigError(f"--settings names plugin {others[0]!r}; here only {args.name!r} is in use")
    report = check_plugin(args.name, args.settings.get(args.name, {}), examples)
    if args.json:
        _write(sys.stdout, json.dumps(report.to_json()))
    else:
        _write(sys.stdout, printable("\n".join(report.lines())))
    return 1 if report.failed else 0


async def _from_file(requests: list[RewardRequest]) -> AsyncIterator[RewardRequest]:
    for request in requests:
        yield request


async def _from_stdin() -> AsyncIterator[RewardRequest]:
    """Requests as they come, read beside the loop.  Raises DataError that names the line."""
    loop, number = asyncio.get_running_loop(), 0
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            number += 1
            if line.strip():
                yield read_line(line, f"standard input:{number}", RewardRequest.from_json)
    except UnicodeDecodeError as error:
        raise DataError(f"standard input: not UTF-8: {error}") from error


async def _score(args: argparse.Namespace) -> int:
    """Judges all requests; 0 whatever the verdicts are.  Those of a file are checked before anything starts."""
    streamed = args.source == "-"
    read = [] if streamed else read_lines(Path(args.source), RewardRequest.from_json)
    requests = [request for _, request in read]
    if not streamed and not requests:
        raise DataError(f"{args.source}: holds no request; each line must be a prompt record with response, finished")
    registry = discover()
    tasks = sorted({request.task for request in requests})
    unsafe = args.unsafe_no_sandbox
    specs = plan_pools(registry, tasks, args.workers, args.settings, unsafe_no_sandbox=unsafe, on_demand=streamed)
    service = RewardService(specs, registry)
    with opened(args.out) as out:
        try:
            if not streamed:
                await service.start()
            source = _from_stdin() if streamed else _from_file(requests)
            async for _, verdict in service.in_order(source, lambda request: request, args.workers):
                _write(out, json.dumps(verdict))
        finally:
            await service.close()
    return 0
