"""Checks of the network: names, interfaces, packet sizes, open ports."""

from ddp_slurm.admin.doctor.finding import Findings, disagreement, error, warning
from ddp_slurm.admin.doctor.snapshot import HIGH_PORT, SLURMCTLD_PORT, SLURMD_PORT, Snapshot
from ddp_slurm.admin.facts import Facts
from ddp_slurm.cluster import Node

HOSTS = "ddp-slurm cluster install --step hosts"
_PORT_USERS = {
    str(SLURMCTLD_PORT): "slurmctld",
    str(SLURMD_PORT): "slurmd",
    str(HIGH_PORT): "torch, NCCL and srun",
}


def name_resolution(snapshot: Snapshot) -> Findings:
    """Names have the same address everywhere, and no loopback one: no other rank reaches it."""
    nodes_of_addresses: dict[str, dict[str, list[str]]] = {}
    for name, facts in snapshot.facts.items():
        for line in facts.values.get("resolves", ()):
            target, *addresses = line.split()
            loopback = [address for address in addresses if _is_loopback(address)]
            if not addresses and target in snapshot.facts:
                yield warning(name, f"the name {target} has no address here", HOSTS)
            elif loopback and len(snapshot.cluster.nodes) > 1:
                cause = f"the name {target} is {loopback[0]} here (see /etc/hosts)"
                yield error(name, cause, _fix_of_hosts(facts, target))
            elif addresses:
                by_addresses = nodes_of_addresses.setdefault(target, {})
                by_addresses.setdefault(" ".join(sorted(set(addresses))), []).append(name)
    for target, by_addresses in nodes_of_addresses.items():
        if len(by_addresses) > 1:
            fewest = min(by_addresses.values(), key=len)
            answers = [f"{text} on {', '.join(names)}" for text, names in by_addresses.items()]
            cause = f"the name {target} has different addresses: {'; '.join(answers)}"
            odd = next(iter(fewest))
            yield warning(fewest, cause, _fix_of_hosts(snapshot.facts[odd], target))


def _fix_of_hosts(facts: Facts, target: str) -> str:
    """The installer, and before it the line that wins over its block."""
    for line in facts.values.get("hosts_line", ()):
        name, number, text = line.split(maxsplit=2)
        if name == target and not text.startswith("127.0.1.1"):  # the installer removes that one
            return f"on it, delete line {number} of /etc/hosts, which wins: {text}; then {HOSTS}"
    return HOSTS


def dns(snapshot: Snapshot) -> Findings:
    """A DNS server answers. One that does not delays every log-in and every name by seconds."""
    for name, facts in snapshot.facts.items():
        servers = facts.first("dns_silent")
        if servers is not None:
            cause = f"no answer for 5 s from the DNS server: {servers or 'none in resolv.conf'}"
            fix = "a server that answers, in /etc/netplan or /etc/resolv.conf"
            yield warning(name, cause, fix)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def interface(snapshot: Snapshot) -> Findings:
    """The network interface of cluster.yaml exists on its node and is up."""
    for node, facts in snapshot.responding():
        if node.interface is None:
            continue
        states = dict(line.split()[:2] for line in facts.values.get("interface", ()))
        state = states.get(node.interface)
        if states and state is None:
            others = ", ".join(name for name in states if name != "lo")
            cause = f"interface {node.interface!r} does not exist; the machine has {others}"
            yield error(node.name, cause, "ddp-slurm cluster probe")
        elif state == "down":
            yield error(node.name, f"interface {node.interface!r} is down", "ip link; the cable")


def packet_size(snapshot: Snapshot) -> Findings:
    """The interfaces between the nodes have one MTU.

    Otherwise large packets vanish: names resolve and ranks meet, and the first all-reduce hangs.
    """
    nodes_of_mtu: dict[str, list[str]] = {}
    for node, facts in snapshot.responding():
        used = _used_interface(snapshot, node, facts)
        for line in facts.values.get("mtu", ()):
            name, mtu = line.split()
            if name == used and mtu != "0":
                nodes_of_mtu.setdefault(mtu, []).append(node.name)
    fix = "ip link set INTERFACE mtu N: one N for nodes and switch"
    yield from disagreement(warning, "MTU between the nodes", nodes_of_mtu, fix)


def _used_interface(snapshot: Snapshot, node: Node, facts: Facts) -> str | None:
    """The interface of cluster.yaml, else the one that leads to another node."""
    if node.interface:
        return node.interface
    for other in snapshot.cluster.nodes:
        if other.name != node.name and other.address:
            return facts.interface_towards(other.address)
    return None


def firewall(snapshot: Snapshot) -> Findings:
    """Between every two nodes the ports of Slurm and of training are open.

    A refused connection is fine: it got through, and no program listens there.
    """
    blocked: dict[tuple[str, str], list[str]] = {}
    for name, facts in snapshot.facts.items():
        for line in facts.values.get("port", ()):
            peer, port, answer = line.split()
            if answer in ("silent", "unreachable") and peer not in snapshot.unreachable:
                blocked.setdefault((name, peer), []).append(port)
    for (name, peer), ports in blocked.items():
        names = [f"{port} ({_PORT_USERS.get(port, 'tcp')})" for port in sorted(ports)]
        cause = f"{name} gets no answer from {peer} on port {', '.join(names)}"
        fix = f"on {peer}, allow the cluster's own network: ufw allow from NETWORK"
        yield error(peer, cause, fix)
