"""Network namespaces: a switch with slurmctld, one namespace a node, one link to this machine.

The bridge is in the controller's namespace and not in the machine's own. So the machine's firewall
(Docker sets forwarding to drop) does not see what the nodes send to each other, and all links but
one vanish with their namespaces.
"""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from ddp_slurm.ask import Answer, ask
from ddp_slurm.lab.errors import LabError
from ddp_slurm.lab.machine import with_system_programs

NETNS_FOLDER = Path("/run/netns")
NETWORKS = [f"198.{18 + n // 256}.{n % 256}" for n in range(512)]
"""198.18.0.0/15 is reserved for tests of network devices (RFC 2544): no real network uses it."""

SWITCH_HOST, MACHINE_HOST = 254, 253
MAX_NODES = 250
DEATH_SECONDS = 20.0


def ip(*args: str) -> str:
    """Run ``ip``; its error becomes a LabError."""
    answer = _try_ip(*args)
    if answer.status:
        raise LabError(f"ip {' '.join(args)}: {answer.err.strip()}")
    return answer.out


def _try_ip(*args: str) -> Answer:
    return ask(["ip", *args], environ=with_system_programs(os.environ))


def link_name(network: int) -> str:
    """The lab's one link on the machine itself; link names have at most 15 characters."""
    return f"ddplab{network}"


def free_network(taken: Iterable[int]) -> int:
    """An index into NETWORKS that neither another lab nor the machine uses."""
    addresses = ip("-o", "-4", "address", "show")
    links = set(os.listdir("/sys/class/net"))
    for n in set(range(len(NETWORKS))).difference(taken):
        address_free = f" {NETWORKS[n]}." not in addresses
        if address_free and link_name(n) not in links:
            return n
    raise LabError(f"all {len(NETWORKS)} networks of 198.18.0.0/15 are in use; take a lab down")


def make_switch(netns: str, network: int) -> None:
    """The controller's namespace with a bridge in it; this machine reaches it at address .254."""
    ip("netns", "add", netns)
    prefix, link = NETWORKS[network], link_name(network)
    ip("-n", netns, "link", "set", "lo", "up")
    ip("-n", netns, "link", "add", "br0", "type", "bridge")
    ip("-n", netns, "address", "add", f"{prefix}.{SWITCH_HOST}/24", "dev", "br0")
    ip("-n", netns, "link", "set", "br0", "up")
    ip("link", "add", link, "type", "veth", "peer", "name", "machine", "netns", netns)
    ip("-n", netns, "link", "set", "machine", "master", "br0", "up")
    ip("address", "add", f"{prefix}.{MACHINE_HOST}/24", "dev", link)
    ip("link", "set", link, "up")


def make_node(netns: str, switch: str, index: int, address: str) -> None:
    """A namespace with one interface, eth0, plugged into the switch."""
    ip("netns", "add", netns)
    switch_end = ["link", "add", f"node{index}", "netns", switch, "type", "veth"]
    node_end = ["peer", "name", "eth0", "netns", netns]
    ip(*switch_end, *node_end)
    ip("-n", netns, "link", "set", "lo", "up")
    ip("-n", netns, "address", "add", f"{address}/24", "dev", "eth0")
    ip("-n", netns, "link", "set", "eth0", "up")
    plug(switch, index, up=True)


def plug(switch: str, index: int, *, up: bool) -> None:
    """Connect a node's cable at the switch, or pull it."""
    ip("-n", switch, "link", "set", f"node{index}", "master", "br0", "up" if up else "down")


def namespaces(prefix: str) -> list[str]:
    """Names of the network namespaces that begin with ``prefix``."""
    if not NETNS_FOLDER.is_dir():
        return []
    return sorted(name for name in os.listdir(NETNS_FOLDER) if name.startswith(prefix))


def processes(netns: str) -> list[int]:
    """All processes inside a namespace, as the kernel reports them: a pid file may be stale."""
    try:
        wanted = os.stat(NETNS_FOLDER / netns)
    except FileNotFoundError:
        return []
    if wanted.st_dev != os.stat("/proc/self/ns/net").st_dev:
        return []  # a plain file: `ip netns add` was killed half-way
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            inside = os.stat(f"/proc/{pid}/ns/net")
        except OSError:  # it has ended meanwhile, or is a zombie
            continue
        if (inside.st_dev, inside.st_ino) == (wanted.st_dev, wanted.st_ino):
            found.append(int(pid))
    return found


def listens(netns: str, port: int) -> bool:
    """Whether something in a namespace listens on a TCP port.

    Asks the kernel: the daemon would log a connection.
    """
    return any(_listens(pid, port) for pid in processes(netns))


TCP_LISTEN = "0A"
"""A state in /proc/PID/net/tcp, whose lines begin: number, local and remote address, state."""


def _listens(pid: int, port: int) -> bool:
    for file in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{file}").read_text().splitlines()
        except OSError:  # no IPv6, or the process has ended meanwhile
            continue
        for line in lines:
            _, local_address, _, state = line.split()[:4]
            if state == TCP_LISTEN and local_address.endswith(f":{port:04X}"):
                return True
    return False


def check_outside(*netns: str) -> None:
    """Raises LabError where this process runs in one of the namespaces: it would kill itself."""
    for name in netns:
        if os.getpid() in processes(name):
            raise LabError(f"this process runs inside {name}; do that from outside the lab")


def kill_processes(netns: str) -> None:
    """SIGKILL everything in a namespace, and children started meanwhile, and wait for their end."""
    give_up = time.monotonic() + DEATH_SECONDS
    pids = processes(netns)
    while pids:
        if time.monotonic() > give_up:
            raise LabError(f"processes {pids} in network namespace {netns} do not end on SIGKILL")
        for pid in pids:
            _kill(pid, netns)
        time.sleep(0.01)
        pids = processes(netns)


def _kill(pid: int, netns: str) -> None:
    """Kill a process if it is still inside: another one may have got its pid since it was read."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if os.path.samefile(f"/proc/{pid}/ns/net", NETNS_FOLDER / netns):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
    finally:
        os.close(handle)


def remove_namespace(netns: str) -> None:
    """End everything in a namespace and remove it, also one that is only half there."""
    kill_processes(netns)
    ip("netns", "delete", netns)


def remove_link(network: int) -> None:
    """Remove the machine's link of a lab; its other end vanishes with it."""
    link = link_name(network)
    answer = _try_ip("link", "delete", link)
    # It may have gone already: the kernel removes the links of a dead namespace in the background.
    if answer.status and link in os.listdir("/sys/class/net"):
        raise LabError(f"ip link delete {link}: {answer.err.strip()}")
