"""Real engines for tests: tiny random Qwen2 models, and engine processes that are started, killed and restarted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_prorl.deadlines import Deadline

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-for-tests-0123456789"
EOS = 2
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def random_weights(tied: bool, seed: int) -> dict[str, Tensor]:
    """HF-named float32 weights; biases and norms are random too, so that a lost one shows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, around: float = 0.0, spread: float = 0.08) -> Tensor:
        return around + spread * torch.randn(*shape, generator=generator)

    hidden, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    head = hidden // CONFIG["num_attention_heads"]
    sizes = {"q": hidden, "k": CONFIG["num_key_value_heads"] * head, "v": CONFIG["num_key_value_heads"] * head}
    weights = {"model.embed_tokens.weight": normal(vocab, hidden), "model.norm.weight": normal(hidden, around=1.0)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, size in sizes.items():
            weights[f"{prefix}self_attn.{name}_proj.weight"] = normal(size, hidden)
            weights[f"{prefix}self_attn.{name}_proj.bias"] = normal(size, spread=0.1)
        weights[f"{prefix}self_attn.o_proj.weight"] = normal(hidden, hidden)
        weights[f"{prefix}mlp.gate_proj.weight"] = normal(inner, hidden)
        weights[f"{prefix}mlp.up_proj.weight"] = normal(inner, hidden)
        weights[f"{prefix}mlp.down_proj.weight"] = normal(hidden, inner)
        weights[f"{prefix}input_layernorm.weight"] = normal(hidden, around=1.0, spread=0.1)
        weights[f"{prefix}post_attention_layernorm.weight"] = normal(hidden, around=1.0, spread=0.1)
    if not tied:
        weights["lm_head.weight"] = normal(vocab, hidden)
    return weights


def write_model(folder: Path, tied: bool, seed: int) -> Path:
    """A Hugging Face model folder, without tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied}))
    save_file(random_weights(tied, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def group_members(group: int) -> list[int]:
    """Living processes of a process group; zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, its_group = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            except OSError:
                continue
            if int(its_group) == group and state != "Z":
                found.append(int(entry.name))
    return found


def command_of(pid: int) -> str:
    """Empty for a process that has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def core_of(group: int) -> int:
    """The process of an engine that holds the model; 0 while there is none."""
    return next((pid for pid in group_members(group) if "EngineCore" in command_of(pid)), 0)


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def shared_memory_of(group: int) -> list[str]:
    """Named files in /dev/shm that processes of a group have mapped."""
    found = set()
    for pid in group_members(group):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line.split()[-1] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
    return sorted(found)


class EngineProcess:
    """One engine server, as a supervisor runs it: `start`, `wait_ready`, `restart`, `stop`."""

    def __init__(self, python: str, model: Path, folder: Path, index: int = 0, *arguments: str) -> None:
        self.python, self.model, self.folder, self.index, self.arguments = python, model, folder, index, arguments
        self.endpoints, self.weights_dir = folder / "endpoints", folder / "weights"
        for path in (self.endpoints, self.weights_dir):
            path.mkdir(parents=True, exist_ok=True)
        self.token_file = folder / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(TOKEN)
        self.endpoint_file = self.endpoints / f"engine-{index}.json"
        self.log = folder / f"engine-{index}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.variables: dict[str, str] = {}

    def command(self, parent: int) -> list[str]:
        values = {
            "model": self.model,
            "token-file": self.token_file,
            "weights-dir": self.weights_dir,
            "endpoint-file": self.endpoint_file,
            "index": self.index,
            "parent-pid": parent,
            "kv-mb": 256,
            "max-model-len": 512,
        }
        flags = [f"--{name}={value}" for name, value in values.items()]
        return [self.python, "-m", "nemo_prorl.rollout.engine.server", "--eager", *flags, *self.arguments]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), **self.variables}

    def start(self) -> "EngineProcess":
        self.endpoint_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(os.getpid()), env=self.environment(), stdout=log, stderr=log, start_new_session=True
            )
        return self

    def wait_ready(self) -> "EngineProcess":
        assert self.process is not None
        deadline = Deadline(180, f"the engine of {self.log}")
        while not self.endpoint_file.exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"the engine left with {self.process.returncode}: {self.log.read_text()[-3000:]}")
            deadline.check()
            time.sleep(0.05)
        return self

    @property
    def endpoint(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.endpoint_file.read_text())
        return value

    @property
    def url(self) -> str:
        return str(self.endpoint["url"])

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def core_pid(self) -> int:
        return core_of(self.pid)

    def wait_gone(self, seconds: float = 20.0) -> None:
        """Until no process of this engine is left, core and guard included."""
        assert self.process is not None
        deadline = Deadline(seconds, f"the end of the processes of engine {self.pid}")
        while (left := group_members(self.pid)) or self.process.poll() is None:
            if deadline.passed:
                raise AssertionError(f"left behind: {[(pid, command_of(pid)) for pid in left]}")
            time.sleep(0.05)

    def restart(self) -> "EngineProcess":
        self.stop()
        return self.start().wait_ready()

    def stop(self) -> None:
        if self.running:
            os.kill(self.pid, signal.SIGTERM)
            try:
                self.wait_gone(20)
            except AssertionError:
                os.killpg(self.pid, signal.SIGKILL)
                self.wait_gone(10)
            else:
                assert not self.endpoint_file.exists()  # taken back by a stop that was asked for


def launcher_of(engine: EngineProcess) -> "subprocess.Popen[bytes]":
    """A process that starts the engine and sleeps, as a launcher would; writes the engine's pid to a file."""
    pid_file = engine.folder / "launched.pid"
    pid_file.unlink(missing_ok=True)
    code = (
        "import os, subprocess, time\n"
        f"command = {engine.command(0)!r}\n"
        "command = [f'--parent-pid={os.getpid()}' if a == '--parent-pid=0' else a for a in command]\n"
        f"log = open({str(engine.log)!r}, 'ab')\n"
        "child = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)\n"
        f"open({str(pid_file)!r} + '.tmp', 'w').write(str(child.pid))\n"
        f"os.replace({str(pid_file)!r} + '.tmp', {str(pid_file)!r})\n"
        "time.sleep(600)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], env=engine.environment())
