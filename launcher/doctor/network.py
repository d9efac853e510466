"""Ports, network interfaces and the Slurm allocation against a configuration."""

import os
import socket
from collections.abc import Collection, Iterator, Mapping

from omegaconf import DictConfig

from nemo_prorl.launcher.doctor.check import Check
from nemo_prorl.launcher.processes import free_port
from nemo_prorl.launcher.slurm_queries import Job
from nemo_prorl.sizing.devices import devices_words, node_devices

_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check_network(cfg: DictConfig, environment: Mapping[str, str]) -> Iterator[Check]:
    nodes = cfg.trainer.num_nodes
    try:
        address = own_address() if nodes > 1 else "127.0.0.1"
    except OSError as error:
        text = f"this machine's name {socket.gethostname()!r} has no address: {error.strerror or error}"
        yield Check("ports", "fail", text, "put it into /etc/hosts or DNS")
    else:
        yield port_judged(address, port_fault(address), nodes)
        variables = {**dict(cfg.launch.env), **environment}
        if nodes > 1 and (fault := loopback_fault(Job().nodes, variables)):
            yield Check("network", "fail", fault)
    yield from interfaces_judged(environment, os.listdir("/sys/class/net"))
    if "SLURM_JOB_ID" in environment:
        yield from allocation_judged(environment, cfg)


def own_address() -> str:
    """Return the IPv4 address of this machine's name, by which other nodes find it.  Raises OSError."""
    return socket.gethostbyname(socket.gethostname())


def loopback_fault(peers: Collection[str], environment: Mapping[str, str], name: str | None = None) -> str | None:
    """Return why ranks of other machines cannot reach this one; None where they can.

    gloo listens at the address of this machine's own name, unless GLOO_SOCKET_IFNAME names an interface.  Where the
    names of all nodes are loopback addresses, they are one machine, as with slurm/dev-cluster.sh.

    Args:
        peers: names of the run's other nodes.
        name: of this machine.
    """
    name = name or socket.gethostname()
    outside = [peer for peer in peers if not _address(peer).startswith("127.")]
    own = _address(name)
    if environment.get("GLOO_SOCKET_IFNAME") or not outside or not own.startswith("127."):
        return None
    return (
        f"this machine's name {name} resolves to {own}, where {outside[0]} cannot reach it: the ranks would wait for"
        f" each other in vain. Fix: let /etc/hosts or DNS give {name} the address by which nodes reach it (no line of"
        f" 127.0.1.1 with {name}), or name the network's interface: +launch.env.GLOO_SOCKET_IFNAME=INTERFACE"
    )


def _address(name: str) -> str:
    """Return the IPv4 address of a name; that of loopback where it has none, as gloo takes it."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return "127.0.0.1"


def port_fault(address: str) -> str:
    """Return why a free port on an address cannot be opened or reached; empty where it can."""
    try:
        with socket.create_server((address, free_port(address))) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def port_judged(address: str, fault: str, nodes: int) -> Check:
    text = f"a port on {address} is opened and reached"
    if fault:
        cure = "look at `ulimit -n`, net.ipv4.ip_local_port_range and the firewall's rules for that address"
        return Check("ports", "fail", f"no port on {address} can be opened and reached: {fault}", cure)
    if nodes > 1 and address.startswith("127."):
        cure = f"let /etc/hosts or DNS give {socket.gethostname()} the address by which nodes reach it; try --nodes"
        return Check("ports", "warn", f"{text}, which other machines cannot reach", cure)
    return Check("ports", "pass", text)


def interfaces_judged(environment: Mapping[str, str], there: Collection[str]) -> Iterator[Check]:
    """NCCL's and Gloo's choice of interfaces: prefixes, `=` before whole names, `^` before those to leave out."""
    for key in _INTERFACES:
        value = environment.get(key, "")
        if not value or value.startswith("^"):
            continue
        whole, names = value.startswith("="), [name for name in value.lstrip("=").split(",") if name]
        if any(name == n or (not whole and n.startswith(name)) for name in names for n in there):
            yield Check("network", "pass", f"{key}={value}")
        else:
            cure = f"unset it, or name one of {', '.join(sorted(there))}"
            yield Check("network", "fail", f"{key}={value}: no such interface here", cure)


def allocation_judged(environment: Mapping[str, str], cfg: DictConfig) -> Iterator[Check]:
    """Compare what Slurm gave with trainer.num_nodes and trainer.devices, by the job's environment."""
    nodes, devices = cfg.trainer.num_nodes, node_devices(cfg)
    given = _number(environment, "SLURM_JOB_NUM_NODES")
    gpus, cores = _number(environment, "SLURM_GPUS_ON_NODE"), _number(environment, "SLURM_CPUS_ON_NODE")
    said = f"job {environment['SLURM_JOB_ID']}: {given} nodes, here {gpus or 0} GPUs and {cores} cores"
    wanted = f"trainer.num_nodes={nodes} x {devices_words(cfg)}"
    wrong = []
    if given is not None and given != nodes:
        cure = f"ask for --nodes={nodes}, or set trainer.num_nodes={given}"
        wrong.append(Check("slurm", "fail", f"{said}; {wanted}", cure))
    if cfg.trainer.accelerator == "gpu" and (gpus or 0) < devices:
        cure = f"ask for --gpus-per-node={devices}, or set trainer.devices={gpus or 1} and the layout to it"
        wrong.append(Check("slurm", "fail", f"{said}; {wanted}", cure))
    processes = cfg.trainer.devices + cfg.rollout.engines // nodes
    if cores is not None and cores < processes + cfg.rewards.workers:
        text = f"{said}; {processes} ranks and engines and rewards.workers={cfg.rewards.workers} share the cores"
        cure = "ask for --exclusive or more --cpus-per-task, or lower rewards.workers"
        wrong.append(Check("slurm", "warn", text, cure))
    yield from wrong or [Check("slurm", "pass", f"{said}, as the run wants: {wanted}")]


def _number(environment: Mapping[str, str], key: str) -> int | None:
    value = environment.get(key, "")
    return int(value) if value.isdigit() else None
