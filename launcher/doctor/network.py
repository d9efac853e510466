"""Checks of ports, network interfaces, the Slurm allocation and the login of Weights & Biases."""

import netrc
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from omegaconf import DictConfig

from nemo_prorl.launcher.allocation import allocation
from nemo_prorl.launcher.doctor.check import Check
from nemo_prorl.launcher.processes import free_port
from nemo_prorl.launcher.slurm_queries import Job
from nemo_prorl.launcher.submission import allocation_faults, gpus_on_node

_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check_network(cfg: DictConfig, environment: Mapping[str, str]) -> Iterator[Check]:
    nodes = cfg.trainer.num_nodes
    try:
        address = own_address() if nodes > 1 else "127.0.0.1"
    except OSError as error:
        text = f"this machine's name {socket.gethostname()!r} does not resolve to an address: {error.strerror or error}"
        yield Check("ports", "fail", text, "add the name to /etc/hosts or DNS")
    else:
        yield assess_port(address, port_fault(address), nodes)
        variables = {**dict(cfg.launch.env), **environment}
        if nodes > 1 and (fault := loopback_fault(Job().nodes, variables)):
            yield Check("network", "fail", fault)
    yield from assess_interfaces(environment, os.listdir("/sys/class/net"))
    if "SLURM_JOB_ID" in environment:
        yield from assess_allocation(environment, cfg)
    if fault := wandb_fault(cfg, environment):
        yield Check("wandb", "fail", fault)


def wandb_fault(cfg: DictConfig, environment: Mapping[str, str]) -> str | None:
    """Return why Weights & Biases would refuse the run; None if it would accept it.

    A key, an offline mode or a settings file suffices.  Without this check the trainer would fail on allocated nodes.
    """
    environment = {**environment, **dict(cfg.launch.env)}
    home = Path(environment.get("HOME") or Path.home())
    settings = Path(environment.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb") / "settings"
    offline = environment.get("WANDB_MODE", "online") not in ("online", "run")
    known = environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE") or settings.is_file()
    keys = cfg.exp_manager
    if not keys.get("create_wandb_logger") or offline or known or keys.wandb_logger_kwargs.get("offline"):
        return None
    host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        if netrc.netrc(environment.get("NETRC") or home / ".netrc").authenticators(host):
            return None
    except (OSError, netrc.NetrcParseError):
        pass  # no key can be read from it
    return (
        f"exp_manager.create_wandb_logger=true, but there is no key for {host} in WANDB_API_KEY or ~/.netrc. Fix: run"
        f" `wandb login`, set WANDB_API_KEY, or log without a network: WANDB_MODE=offline"
    )


def own_address() -> str:
    """Return the IPv4 address of this machine's name, to which other nodes connect.  Raises OSError."""
    return socket.gethostbyname(socket.gethostname())


def loopback_fault(peers: Collection[str], environment: Mapping[str, str], name: str | None = None) -> str | None:
    """Return why ranks of other machines cannot reach this machine; None if they can.

    gloo listens at the address of this machine's name, unless GLOO_SOCKET_IFNAME names an interface.  If the names of
    all nodes resolve to loopback addresses, all nodes are one machine, as with slurm/dev-cluster.sh.

    Args:
        peers: names of the run's nodes.
        name: this machine's name; None: its host name.
    """
    name = name or socket.gethostname()
    outside = [peer for peer in peers if not _address(peer).startswith("127.")]
    own = _address(name)
    if environment.get("GLOO_SOCKET_IFNAME") or not outside or not own.startswith("127."):
        return None
    return (
        f"this machine's name {name} resolves to {own}, which {outside[0]} cannot reach: the ranks of the nodes could"
        f" not connect to each other. Fix: give {name} its network address in /etc/hosts or DNS (and remove a line"
        f" 127.0.1.1 {name} from /etc/hosts), or name the network interface: +launch.env.GLOO_SOCKET_IFNAME=INTERFACE"
    )


def _address(name: str) -> str:
    """Return the IPv4 address of a name; 127.0.0.1, as gloo does, if the name does not resolve."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return "127.0.0.1"


def port_fault(address: str) -> str:
    """Return why a free port on an address cannot be opened or reached; an empty string if it can."""
    try:
        with socket.create_server((address, free_port(address))) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def assess_port(address: str, fault: str, nodes: int) -> Check:
    text = f"a port on {address} can be opened and reached"
    if fault:
        fix = "check `ulimit -n`, net.ipv4.ip_local_port_range and the firewall rules for this address"
        return Check("ports", "fail", f"no port on {address} can be opened and reached: {fault}", fix)
    if nodes > 1 and address.startswith("127."):
        fix = f"give {socket.gethostname()} its network address in /etc/hosts or DNS; check the nodes with --nodes"
        return Check("ports", "warn", f"{text}, but not from other machines", fix)
    return Check("ports", "pass", text)


def assess_interfaces(environment: Mapping[str, str], there: Collection[str]) -> Iterator[Check]:
    """Assess the variables that name network interfaces for NCCL and Gloo.

    A value lists prefixes of names.  After `=` it lists whole names; after `^` it lists excluded names, which are not
    checked.

    Args:
        there: names of this machine's interfaces.
    """
    for key in _INTERFACES:
        value = environment.get(key, "")
        if not value or value.startswith("^"):
            continue
        whole, names = value.startswith("="), [name for name in value.lstrip("=").split(",") if name]
        if any(name == n or (not whole and n.startswith(name)) for name in names for n in there):
            yield Check("network", "pass", f"{key}={value}")
        else:
            fix = f"unset it, or set it to one of {', '.join(sorted(there))}"
            yield Check("network", "fail", f"{key}={value}: this machine has no such interface", fix)


def assess_allocation(environment: Mapping[str, str], cfg: DictConfig) -> Iterator[Check]:
    """Compare the Slurm job of this process, as its environment describes it, with the needs of the configuration."""
    needs, nodes = allocation(cfg), _number(environment, "SLURM_JOB_NUM_NODES")
    gpus, cores = gpus_on_node(environment), _number(environment, "SLURM_CPUS_ON_NODE")
    job = f"job {environment['SLURM_JOB_ID']}: {nodes} nodes; on this node {gpus} GPUs and {cores} cores"
    faults = allocation_faults(needs, needs["num_nodes"] if nodes is None else nodes, gpus)
    wrong = [Check("slurm", "fail", f"{job}; {fault}", fix) for fault, fix in faults]
    processes = cfg.trainer.devices + cfg.rollout.engines // needs["num_nodes"]
    if cores is not None and cores < processes + cfg.rewards.workers:
        text = f"{job}; {processes} ranks and engines and rewards.workers={cfg.rewards.workers} share these cores"
        fix = "request --exclusive or more --cpus-per-task, or lower rewards.workers"
        wrong.append(Check("slurm", "warn", text, fix))
    wanted = f"trainer.num_nodes={needs['num_nodes']} x {needs['devices_words']}"
    yield from wrong or [Check("slurm", "pass", f"{job}; the run needs {wanted}")]


def _number(environment: Mapping[str, str], key: str) -> int | None:
    value = environment.get(key, "")
    return int(value) if value.isdigit() else None
