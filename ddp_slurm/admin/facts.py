"""What a node says of itself: one shell script's output (cluster_setup/facts.sh), parsed into values."""

import json
import re
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from ipaddress import IPv4Address

from ddp_slurm.admin.gpus import Gpu, parse_gpus
from ddp_slurm.cluster import Node
from ddp_slurm.ssh.command import RemoteError
from ddp_slurm.ssh.run import Runner, run, run_script


@dataclass(frozen=True, slots=True)
class Block:
    """A command's exit status, and its standard output and error as one text."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class Topology:
    """Slurm's words: a core may have several threads, and CPUs counts threads."""

    sockets: int
    cores_per_socket: int
    threads_per_core: int

    @property
    def cpus(self) -> int:
        return self.sockets * self.cores_per_socket * self.threads_per_core


@dataclass(frozen=True)
class Facts:
    """Everything a node told: the lines ``fact KEY VALUE`` by key, and whole outputs by name."""

    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    blocks: Mapping[str, tuple[Block, ...]] = field(default_factory=dict)
    clock_offset_seconds: float | None = None
    """The node's clock minus this machine's."""
    clock_error_seconds: float = 0.0
    """How far ``clock_offset_seconds`` may be off: half of the time that the answer took."""

    def first(self, key: str) -> str | None:
        return next(iter(self.values.get(key, ())), None)

    def block(self, name: str) -> Block | None:
        return next(iter(self.blocks.get(name, ())), None)

    @property
    def host(self) -> str:
        """The short host name, which is the name that slurmd looks for in slurm.conf."""
        return (self.first("hostname") or "").split(".")[0]

    @property
    def memory_mb(self) -> int | None:
        """Memory in MiB as the kernel counts it, which is what slurmd compares with RealMemory."""
        kib = self.first("memory_kib")
        return int(kib) // 1024 if kib and kib.isdigit() else None

    @cached_property
    def topology(self) -> Topology | None:
        """From the kernel's own numbering. None where it shows none, or cores that differ from socket to socket."""
        threads = [tuple(line.split()) for line in self.values.get("cpu", ())]
        cores = sorted(set(threads))
        sockets = {socket for socket, _ in cores}
        if not threads or len(cores) % len(sockets) or len(threads) % len(cores):
            return None
        return Topology(len(sockets), len(cores) // len(sockets), len(threads) // len(cores))

    @property
    def cpus(self) -> int | None:
        """Hardware threads."""
        threads = len(self.values.get("cpu", ()))
        usable = self.first("cpus_usable")
        return threads or (int(usable) if usable and usable.isdigit() else None)

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        return parse_gpus(
            {name: [(b.status, b.text) for b in blocks] for name, blocks in self.blocks.items()}
        )

    @cached_property
    def addresses(self) -> dict[str, str]:
        """Interface of each address, from ``ip -o addr``; loopback and link-local left out."""
        block = self.block("addresses")
        pairs = re.findall(
            r"^\d+: (\S+) +inet6? ([0-9a-f.:]+)/\d+.* scope global",
            block.text if block else "",
            re.M,
        )
        return {address: name.split("@")[0] for name, address in pairs}

    def interface_towards(self, address: str) -> str | None:
        """The interface that leads to an IPv4 address, by the longest prefix of the kernel's routes."""
        try:
            target = int(IPv4Address(address))
        except ValueError:
            return None
        block = self.block("routes")
        best: tuple[int, str] | None = None
        for line in (block.text if block else "").splitlines()[1:]:
            words = line.split()
            if len(words) < 8 or not int(words[3], 16) & 1:  # RTF_UP
                continue
            network, mask = _kernel_number(words[1]), _kernel_number(words[7])
            if target & mask == network and (best is None or mask > best[0]):
                best = (mask, words[0])
        return best[1] if best else None

    def link_speed_mbit(self, interface: str) -> int | None:
        for line in self.values.get("interface", ()):
            name, _, speed = line.split()
            if name == interface and speed.isdigit() and speed != "0":
                return int(speed)
        return None

    @cached_property
    def training(self) -> dict[str, str]:
        """Versions that the training interpreter sees: python, torch, cuda, cudnn, nccl, or torch_fault."""
        block = self.block("training")
        lines = [
            line for line in (block.text if block else "").splitlines() if line.startswith("facts ")
        ]
        return {str(k): str(v) for k, v in json.loads(lines[-1][6:]).items()} if lines else {}


def _kernel_number(text: str) -> int:
    """/proc/net/route prints an address as the hexadecimal number that its four bytes make in memory."""
    return int.from_bytes(int(text, 16).to_bytes(4, "little"), "big")


def parse_facts(text: str) -> Facts:
    """The facts of a script's output; a login banner around them is passed over.

    Raises RemoteError when the output ends before the script did.
    """
    values: dict[str, list[str]] = {}
    blocks: dict[str, list[Block]] = {}
    current: tuple[str, int, list[str]] | None = None
    lines = text.splitlines()
    if "facts begin" not in lines or "facts end" not in lines[lines.index("facts begin") :]:
        tail = lines[-1] if lines else "nothing"
        raise RemoteError(f"the answer is not complete; its last line is {tail!r}")
    for line in [*lines[lines.index("facts begin") :], "end"]:
        if current is not None and not line.startswith("|"):
            name, status, content = current
            blocks.setdefault(name, []).append(Block(status, "\n".join(content)))
            current = None
        kind, _, rest = line.partition(" ")
        if line.startswith("|") and current is not None:
            current[2].append(line[1:])
        elif kind == "fact":
            key, _, value = rest.partition(" ")
            values.setdefault(key, []).append(value.strip())
        elif kind == "block":
            name, _, status_text = rest.partition(" ")
            current = (name, int(status_text) if status_text.isdigit() else 1, [])
    return Facts({k: tuple(v) for k, v in values.items()}, {k: tuple(v) for k, v in blocks.items()})


def facts_script(settings: Mapping[str, str]) -> str:
    """The script that a node runs, with its settings (DEPTH, PEERS, ...) before it."""
    source = (
        resources.files("ddp_slurm.cluster_setup").joinpath("facts.sh").read_text(encoding="utf-8")
    )
    return "\n".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), source]
    )


def gather(
    node: Node,
    settings: Mapping[str, str] | None = None,
    *,
    runner: Runner = run,
    as_root: bool = False,
) -> Facts:
    """Ask one node. Raises RemoteError where it cannot be reached or its shell did not get through the script."""
    before = time.time()
    result = run_script(
        node, facts_script(settings or {}), as_root=as_root, timeout_seconds=300, runner=runner
    )
    elapsed = time.time() - before
    try:
        facts = parse_facts(result.out)
    except RemoteError as fault:
        said = result.err.strip().splitlines()
        raise RemoteError(
            f"{node.name}: {fault}{'; it said ' + said[-1] if said else ''}"
        ) from None
    now = facts.first("now") or ""
    if not re.fullmatch(r"\d+(\.\d+)?", now):
        return facts
    # The clock is read first thing; what comes before it is the login, so the truth lies within the whole time.
    return Facts(facts.values, facts.blocks, float(now) - (before + elapsed / 2), elapsed / 2)


def peers_text(nodes: Iterable[Node]) -> str:
    """Nodes as the words NAME=ADDRESS of the script's PEERS."""
    return " ".join(f"{node.name}={node.address or node.name}" for node in nodes)
