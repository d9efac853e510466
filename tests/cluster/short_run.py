"""The Python of a job whose ranks, engine and reward server are stand-ins: everything about a job but the training.

short_run.py -m nemo_prorl.launcher.node ...     the node supervisor, with stand-ins for what it starts
short_run.py -m MODULE ...                       as Python does
short_run.py rank RUN_DIR RANK STEPS RANKS       a stand-in of a trainer rank

Rank 0 makes a checkpoint each 0.4 s.  Files in RUN_DIR/orders: `kill-RANK` makes that rank kill itself at each start,
`kill-once-RANK` at one; the others lose a connection and end with 1.  `stop` makes all end with 75, as after `prorl
control stop`; `hold-STEP` lets rank 0 make no step after that one before something ends it.
"""

import contextlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent.parent


def connect(run_dir: Path, number: int, ranks: int) -> list[socket.socket]:
    """Return connections of rank 0 with every other rank, as torch's are."""
    file = run_dir / "master"
    if number > 0:
        while not file.exists():
            time.sleep(0.02)
        host, _, port = file.read_text().rpartition(":")
        return [socket.create_connection((host, int(port)))]
    server = socket.create_server(("", 0))
    file.with_suffix(".tmp").write_text(f"{os.environ['SLURMD_NODENAME']}:{server.getsockname()[1]}")
    file.with_suffix(".tmp").replace(file)
    return [server.accept()[0] for _ in range(ranks - 1)]


def rank(run_dir: Path, number: int, steps: int, ranks: int) -> int:
    """Exit code 0 after the last step, 75 when asked to stop."""
    sys.path.insert(0, str(ROOT))
    from nemo_prorl.lifecycle.stopping import FORWARDED_AS

    asked: list[int] = []
    for requested in FORWARDED_AS.values():
        signal.signal(requested, lambda *_: asked.append(1))
    orders, checkpoints = run_dir / "orders", run_dir / "checkpoints"

    def let_go() -> None:
        for path in orders.glob("hold-*"):
            path.unlink(missing_ok=True)

    def watch(peer: socket.socket) -> None:
        """A collective fails when a rank is gone that has not said good-bye."""
        with contextlib.suppress(OSError):
            if peer.recv(1):
                return
        let_go()
        os._exit(1)

    def end(code: int) -> int:
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.send(b"!")
        return code

    peers = connect(run_dir, number, ranks)
    for peer in peers:
        threading.Thread(target=watch, args=(peer,), daemon=True).start()
    while True:
        done = max((int(p.name[5:]) for p in checkpoints.glob("step-*")), default=0)
        if done >= steps:
            return end(0)
        if asked or (orders / "stop").exists() or (run_dir / "stopped").exists():
            (run_dir / "stopped").touch()  # ranks agree on a stop
            let_go()
            return end(75)
        if (orders / f"kill-{number}").exists() or (orders / f"kill-once-{number}").exists():
            (orders / f"kill-once-{number}").unlink(missing_ok=True)
            let_go()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.4 if number == 0 else 0.1)
        if number == 0 and not (orders / f"hold-{done}").exists():
            made = checkpoints / f"step-{done + 1:06d}"
            made.mkdir(parents=True)
            (made / "state.tmp").write_text(json.dumps({"by": os.environ["SLURMD_NODENAME"]}))
            (made / "state.tmp").replace(made / "state.json")  # the test reads it at any moment


def stand_in() -> None:
    """Replaces what the node supervisor starts, and what it prepares for them."""
    weights = ModuleType("nemo_prorl.rollout.weight_store")  # the real one imports torch, which takes seconds
    vars(weights)["WeightStore"] = lambda folder: SimpleNamespace(folder=folder, remove_stale=list, remove=lambda: None)
    vars(weights)["weights_folder"] = lambda run_dir, node: run_dir / f"weights-{node}"
    sys.modules[weights.__name__] = weights
    from nemo_prorl.launcher import prepare, run_results, supervisor
    from nemo_prorl.launcher.processes import Child

    def prepared(cfg: object, run_dir: Path, config_text: str) -> list[str]:
        for path in (run_dir / "stopped", run_dir / "master"):
            path.unlink(missing_ok=True)
        for name in ("logs", "endpoints", "checkpoints"):
            (run_dir / name).mkdir(exist_ok=True)
        (run_dir / "config.yaml").write_text(config_text)
        return ["math"]

    def sleeps(name: str) -> "object":
        def start(self: supervisor.NodeSupervisor, *_: object) -> Child:
            code = "import time; time.sleep(600)"
            return self._child(f"{name}-{self.place.node}", [sys.executable, "-c", code], {}, 0, False)

        return start

    def ranks(self: supervisor.NodeSupervisor, _: list[str]) -> list[Child]:
        number, steps = self.place.node, self.cfg.trainer.grpo.max_steps
        command = [sys.executable, __file__, "rank", str(self.dir), str(number), str(steps), str(self.place.nodes)]
        return [self._child(f"trainer-{number}", command, {}, 0, False)]

    for module, name, value in (
        (prepare, "prepare", prepared),
        (prepare, "check_node", lambda *_: None),
        (run_results, "print_results", lambda run_dir: None),
        (supervisor.NodeSupervisor, "_rewards", sleeps("rewards")),
        (supervisor.NodeSupervisor, "_engine", sleeps("engine")),
        (supervisor.NodeSupervisor, "_ranks", ranks),
    ):
        assert hasattr(module, name), f"{module}.{name}: nothing to replace"
        setattr(module, name, value)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        sys.exit(rank(Path(sys.argv[2]), *map(int, sys.argv[3:6])))
    sys.path[0] = str(ROOT)
    if sys.argv[2] == "nemo_prorl.launcher.node":
        stand_in()
    module = sys.argv[2]
    sys.argv[1:3] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)
