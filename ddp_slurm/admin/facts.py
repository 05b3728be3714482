"""What a node reports: the output of one shell script (cluster_setup/facts.sh) as values."""

import json
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from ipaddress import IPv4Address
from typing import NamedTuple

from ddp_slurm.admin.gpus import Gpu, nvidia_error, parse_gpus, undivided_mig_cards
from ddp_slurm.admin.gpus.gpu import successful_text
from ddp_slurm.cluster import Node
from ddp_slurm.ssh.command import RemoteError
from ddp_slurm.ssh.run import Runner, last_lines, run, run_script

FACTS_TIMEOUT_SECONDS = 300.0


class Block(NamedTuple):
    """A command's exit status, and its standard output and error as one text."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class Topology:
    """In Slurm's terms: a core may have several threads, and CPUs counts threads."""

    sockets: int
    cores_per_socket: int
    threads_per_core: int


@dataclass(frozen=True)
class Facts:
    """Everything a node reported: the lines ``fact KEY VALUE``, and whole outputs by name."""

    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    blocks: Mapping[str, tuple[Block, ...]] = field(default_factory=dict)
    clock_offset_seconds: float | None = None
    """The node's clock minus this machine's."""
    clock_error_seconds: float = 0.0
    """How far ``clock_offset_seconds`` may be off: half of the time that the answer took."""

    def first(self, key: str) -> str | None:
        values = self.values.get(key)
        return values[0] if values else None

    def block(self, name: str) -> Block | None:
        blocks = self.blocks.get(name)
        return blocks[0] if blocks else None

    def answer(self, name: str) -> str:
        """What a command printed where it succeeded; empty elsewhere."""
        return successful_text(self.blocks, name)

    def text(self, name: str) -> str:
        """What a command printed, also where it failed; empty where it was not run."""
        block = self.block(name)
        return block.text if block else ""

    def block_lines(self, name: str) -> list[str]:
        return self.text(name).splitlines()

    @property
    def host(self) -> str:
        """The short host name, which is the name that slurmd looks for in slurm.conf."""
        return (self.first("hostname") or "").split(".")[0]

    @property
    def memory_mb(self) -> int | None:
        """Memory in MiB as the kernel counts it; slurmd compares this with RealMemory."""
        kib = self.first("memory_kib")
        return int(kib) // 1024 if kib and kib.isdecimal() else None

    @cached_property
    def topology(self) -> Topology | None:
        """From the kernel's own numbering.

        None where it shows none, or where sockets or cores differ from each other.
        """
        cores_of_threads = [tuple(line.split()) for line in self.values.get("cpu", ())]
        cores = set(cores_of_threads)
        sockets = {place[0] for place in cores if len(place) == 2}
        if not sockets:
            return None
        if len(cores) % len(sockets) or len(cores_of_threads) % len(cores):
            return None
        return Topology(
            sockets=len(sockets),
            cores_per_socket=len(cores) // len(sockets),
            threads_per_core=len(cores_of_threads) // len(cores),
        )

    @property
    def cpus(self) -> int | None:
        """Hardware threads."""
        threads = len(self.values.get("cpu", ()))
        if threads:
            return threads
        usable = self.first("cpus_usable")
        return int(usable) if usable and usable.isdecimal() else None

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        return parse_gpus(self.blocks)

    @property
    def nvidia_error(self) -> str | None:
        """Why nvidia-smi fails; None where it works, and where it does not exist."""
        block = self.block("nvidia-smi")
        return nvidia_error(*block) if block else None

    @cached_property
    def undivided_mig_cards(self) -> list[int]:
        """The indices of cards with MIG enabled but without instances."""
        return undivided_mig_cards(self.blocks)

    @cached_property
    def interface_of_address(self) -> dict[str, str]:
        """From ``ip -o addr``, without loopback and link-local addresses."""
        interfaces = {}
        for line in self.block_lines("addresses"):
            match = re.match(r"\d+: (\S+) +inet6? ([0-9a-f.:]+)/\d+.* scope global", line)
            if match:
                interfaces[match[2]] = match[1].split("@")[0]
        return interfaces

    def interface_towards(self, address: str) -> str | None:
        """The interface that leads to an IPv4 address: the longest prefix of the kernel's routes.

        None where no route leads there, and for other addresses.
        """
        try:
            target = int(IPv4Address(address))
        except ValueError:
            return None
        matching = [route for route in self._routes() if target & route.mask == route.network]
        if not matching:
            return None
        return max(matching, key=lambda route: route.mask).interface

    def _routes(self) -> Iterator["_Route"]:
        """The routes of /proc/net/route that are up."""
        for line in self.block_lines("routes")[1:]:
            columns = line.split()
            try:
                is_up = int(columns[3], 16) & 1  # RTF_UP
                route = _Route(columns[0], _kernel_number(columns[1]), _kernel_number(columns[7]))
            except (IndexError, ValueError):  # a damaged line
                continue
            if is_up:
                yield route

    def link_speed_mbit(self, interface: str) -> int | None:
        for line in self.values.get("interface", ()):
            found = re.fullmatch(r"(\S+) \S+ ([1-9][0-9]*)", line)
            if found and found[1] == interface:
                return int(found[2])
        return None

    @cached_property
    def training(self) -> dict[str, str]:
        """What the training interpreter reports: python, torch, cuda, ... or torch_error.

        Empty where it does not run.
        """
        for line in reversed(self.block_lines("training")):
            if line.startswith("facts "):
                try:
                    values = dict(json.loads(line.removeprefix("facts ")))
                except (ValueError, TypeError):
                    return {"torch_error": f"its report is damaged: {line}"}
                return {str(key): str(value) for key, value in values.items()}
        return {}


@dataclass(frozen=True, slots=True)
class _Route:
    interface: str
    network: int
    mask: int


def _kernel_number(text: str) -> int:
    """/proc/net/route prints the hexadecimal number that an address's four bytes are in memory."""
    return int.from_bytes(bytes.fromhex(text), "little")


def parse_facts(text: str) -> Facts:
    """The facts of a script's output; a login banner around them is skipped.

    Raises RemoteError when the output ends before the script did.
    """
    lines = text.splitlines()
    try:
        begin = lines.index("facts begin")
        end = lines.index("facts end", begin)
    except ValueError:
        tail = lines[-1] if lines else ""
        raise RemoteError(f"the output is incomplete; its last line is {tail!r}") from None
    values: dict[str, list[str]] = {}
    blocks: dict[str, list[tuple[int, list[str]]]] = {}
    block_lines: list[str] = []
    for line in lines[begin:end]:
        if line.startswith("|"):
            block_lines.append(line[1:])
        elif line.startswith("fact "):
            _, key, value = f"{line} ".split(" ", 2)
            values.setdefault(key, []).append(value.strip())
        elif line.startswith("block "):
            _, name, status = f"{line} ".split(" ", 2)
            block_lines = []
            number = int(status) if status.strip().isdecimal() else 1
            blocks.setdefault(name, []).append((number, block_lines))
    whole_blocks = {}
    for name, opened in blocks.items():
        whole_blocks[name] = tuple(Block(status, "\n".join(text)) for status, text in opened)
    return Facts({key: tuple(items) for key, items in values.items()}, whole_blocks)


def facts_script(settings: Mapping[str, str]) -> str:
    """The script that a node runs, with its settings (DEPTH, PEERS, ...) before it."""
    script = resources.files("ddp_slurm.cluster_setup").joinpath("facts.sh")
    assignments = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    return "\n".join([*assignments, script.read_text(encoding="utf-8")])


def gather(node: Node, settings: Mapping[str, str] | None = None, *, runner: Runner = run) -> Facts:
    """Ask one node.

    Raises RemoteError where it cannot be reached or its shell did not get through the script.
    """
    script = facts_script(settings or {})
    before = time.time()
    answer = run_script(node, script, timeout_seconds=FACTS_TIMEOUT_SECONDS, runner=runner)
    elapsed = time.time() - before
    try:
        facts = parse_facts(answer.out)
    except RemoteError as error:
        message = last_lines(answer.err)
        cause = f"; its error output ends with {message!r}" if message else ""
        raise RemoteError(f"{node.name}: {error}{cause}") from None
    now = facts.first("now") or ""
    if not re.fullmatch(r"\d+(\.\d+)?", now):
        return facts
    # The script reads the clock first, after the login: the true offset is within the whole time.
    return replace(
        facts,
        clock_offset_seconds=float(now) - (before + elapsed / 2),
        clock_error_seconds=elapsed / 2,
    )


def peers_text(nodes: Iterable[Node]) -> str:
    """Nodes as the words NAME=ADDRESS of the script's PEERS."""
    return " ".join(f"{node.name}={node.address or node.name}" for node in nodes)
