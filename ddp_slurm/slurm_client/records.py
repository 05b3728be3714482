"""The one parser of Slurm's records: ``scontrol show node|partition|job``, and gres.

A record begins with ``NodeName=``, ``PartitionName=`` or ``JobId=`` in the first column, and each
of its other lines with three blanks. Read it without ``--oneliner``: free text (a job's
name, a comment, a reason) then extends to the end of its line, and what looks like ``Key=value`` in
it is not read as a key. Records of nodes and partitions may also come from ``-o``: there the free
text comes last.

The form is the same from Slurm 20.11 to 26.05.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

Record = Mapping[str, str]
"""Keys and values as Slurm printed them, except ``(null)`` and ``N/A``, which are left out."""

FREE_TEXT = {
    "NodeName": {"Reason", "Comment", "Extra"},
    "PartitionName": set[str](),
    "JobId": {
        "JobName",
        "Comment",
        "AdminComment",
        "SystemComment",
        "Extra",
        "Command",
        "SubmitLine",
        "WorkDir",
        "StdErr",
        "StdIn",
        "StdOut",
    },
}
"""By the first key of a record, the keys whose value reaches to the end of the line."""

_KEY = re.compile(r"(?:^| )([A-Z][A-Za-z_/:]*)=")


def read_records(text: str, first_key: str) -> list[Record]:
    """The records that begin with ``first_key``; of a key that comes twice the first one counts."""
    records: list[dict[str, str]] = []
    for line in text.split("\n"):
        if line.startswith(f"{first_key}="):
            records.append({})
        elif not records or not re.match(" {3}[A-Z]", line):
            continue
        for key, value in _pairs(line, FREE_TEXT[first_key]):
            records[-1].setdefault(key, value)
    return [
        {key: value for key, value in record.items() if value not in ("(null)", "N/A")}
        for record in records
    ]


def _pairs(line: str, free_text: set[str]) -> Iterator[tuple[str, str]]:
    keys = list(_KEY.finditer(line))
    for key, following in zip_longest(keys, keys[1:]):
        if key[1] in free_text:
            yield key[1], line[key.end() :].strip()
            return
        end = following.start() if following else len(line)
        yield key[1], line[key.end() : end].strip()


class Gres(NamedTuple):
    """One item of a node's or a job's gres, such as ``gpu:a100:4``."""

    name: str
    type: str | None
    number: int


def read_gres(text: str) -> tuple[Gres, ...]:
    """The items of a gres text.

    The rule, which cluster_setup/gpu_check.sh follows as well: text in parentheses, which may hold
    commas, is left out; items are separated by commas and their words by colons; a last word of
    digits is the count, else the count is 1; the words between name and count are the type.

    >>> [(g.name, g.type, g.number) for g in read_gres("gpu:a100:4(S:0,2),gpu:2,gpu:a:b:2,nic")]
    [('gpu', 'a100', 4), ('gpu', None, 2), ('gpu', 'a:b', 2), ('nic', None, 1)]
    """
    items = []
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *words = [word for word in item.strip().split(":") if word != "no_consume"]
        if not name:
            continue
        count = int(words.pop()) if words and words[-1].isdecimal() else 1
        items.append(Gres(name, ":".join(words) or None, count))
    return tuple(items)


_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
"""The signs behind a state in sinfo(1), NODE STATE CODES."""
_UNAVAILABLE = {
    "DOWN",
    "DRAIN",
    "DRAINED",
    "DRAINING",
    "ERROR",
    "FAIL",
    "FAILING",
    "FUTURE",
    "INVAL",
    "INVALID_REG",
    "MAINT",
    "MAINTENANCE",
    "NO_RESPOND",
    "NOT_RESPONDING",
    "UNKNOWN",
}
"""Node states and flags with which no new job starts (sinfo(1); node_state_string in Slurm's
source). Not among them is what passes by itself, and what power saving does: Slurm boots the node
for the job."""
_POWER_SAVING = {"POWER", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_UP"}
"""``POWER`` is the word of Slurm 20.11."""


def state_words(state: str) -> frozenset[str]:
    """The state and its flags: ``IDLE*+DRAIN`` gives IDLE, NOT_RESPONDING and DRAIN."""
    words = set()
    for part in state.split("+"):
        word = part.rstrip("".join(_SUFFIXES))
        words.add(word)
        words.update(_SUFFIXES[sign] for sign in part[len(word) :])
    return frozenset(words - {""})


def unavailable_words(state: str) -> frozenset[str]:
    """Why no new job starts on a node in this state; empty for one that takes jobs.

    A node that power saving has switched off does not respond, which is no error.
    """
    words = state_words(state)
    unavailable = words & _UNAVAILABLE
    if is_switched_off(state):
        unavailable -= {"NOT_RESPONDING", "NO_RESPOND"}
    return unavailable


def is_switched_off(state: str) -> bool:
    """Whether power saving has switched a node off, or is switching it off or on."""
    return bool(state_words(state) & _POWER_SAVING)


class NodeRecord(NamedTuple):
    """A node as slurmctld sees it; None where the record does not have the value."""

    name: str
    state: str
    version: str | None
    """The release of its slurmd."""
    address: str | None
    host_name: str | None
    """NodeHostName: what slurmd finds as the machine's host name; mostly the node's name."""
    reason: str
    reason_by: str
    """The user who set the reason; ``slurm`` is the daemon's own."""
    reason_since: str
    """When it was set, ``2026-11-28T00:19:26``; empty without a reason."""
    cpus: int | None
    usable_cpus: int | None
    """Without those that are reserved for the system (CpuSpecList, CoreSpecCount)."""
    sockets: int | None
    cores_per_socket: int | None
    threads_per_core: int | None
    real_memory_mb: int | None
    reserved_memory_mb: int
    """MemSpecLimit: what jobs cannot have of ``real_memory_mb``."""
    gres: tuple[Gres, ...]
    features: tuple[str, ...]
    partitions: tuple[str, ...]

    @property
    def gpus(self) -> int:
        """How many GPUs slurm.conf gives the node."""
        return sum(gres.number for gres in self.gres if gres.name == "gpu")

    @property
    def why_unavailable(self) -> str | None:
        """Its state and Slurm's reason where no new job starts there; None where jobs start."""
        if not unavailable_words(self.state):
            return None
        return f"its state is {self.state}" + (f": {self.reason}" if self.reason else "")


def read_nodes(text: str) -> list[NodeRecord]:
    """The nodes of ``scontrol show node``, with or without ``-o``."""
    return [_node(record) for record in read_records(text, "NodeName")]


def _node(record: Record) -> NodeRecord:
    reason, reason_by, reason_since = _split_reason(record.get("Reason", ""))
    cpus = number(record, "CPUTot")
    return NodeRecord(
        name=record["NodeName"],
        state=record.get("State", "UNKNOWN"),
        version=record.get("Version"),
        address=record.get("NodeAddr"),
        host_name=record.get("NodeHostName"),
        reason=reason,
        reason_by=reason_by,
        reason_since=reason_since,
        cpus=cpus,
        usable_cpus=number(record, "CPUEfctv") or cpus,
        sockets=number(record, "Sockets"),
        cores_per_socket=number(record, "CoresPerSocket"),
        threads_per_core=number(record, "ThreadsPerCore"),
        real_memory_mb=number(record, "RealMemory"),
        reserved_memory_mb=number(record, "MemSpecLimit") or 0,
        gres=read_gres(record.get("Gres", "")),
        features=_words(record, "AvailableFeatures"),
        partitions=_words(record, "Partitions"),
    )


def _split_reason(text: str) -> tuple[str, str, str]:
    """``fan``, ``root`` and the time of ``fan [root@2026-11-28T00:19:26]``."""
    match = re.match(r"(.*?) ?\[(\S+)@([0-9T:-]+)\]", text)
    return (match[1], match[2], match[3]) if match else (text, "", "")


class PartitionRecord(NamedTuple):
    """A partition; None for what is unlimited, and empty for lists that allow everybody."""

    name: str
    state: str
    is_default: bool
    root_only: bool
    total_nodes: int
    max_nodes: int | None
    max_minutes: int | None
    allowed_accounts: tuple[str, ...]
    allowed_groups: tuple[str, ...]


def read_partitions(text: str) -> list[PartitionRecord]:
    """The partitions of ``scontrol show partition``, with or without ``-o``."""
    return [_partition(record) for record in read_records(text, "PartitionName")]


def _partition(record: Record) -> PartitionRecord:
    return PartitionRecord(
        name=record["PartitionName"],
        state=record.get("State", "UNKNOWN"),
        is_default=record.get("Default") == "YES",
        root_only=record.get("RootOnly") == "YES",
        total_nodes=number(record, "TotalNodes") or 0,
        max_nodes=number(record, "MaxNodes"),
        max_minutes=read_minutes(record.get("MaxTime", "UNLIMITED")),
        allowed_accounts=_allowed(record, "AllowAccounts"),
        allowed_groups=_allowed(record, "AllowGroups"),
    )


def read_minutes(limit: str) -> int | None:
    """Minutes of a time limit as Slurm prints it, ``[DAYS-]HH:MM:SS``; None for another text.

    >>> read_minutes("1-02:00:30"), read_minutes("UNLIMITED")
    (1561, None)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", limit)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes + (seconds > 0)


def number(record: Record, key: str) -> int | None:
    """The whole number of a key; None where the key is missing or has another value."""
    value = record.get(key, "")
    return int(value) if value.isdecimal() else None


def _words(record: Record, key: str) -> tuple[str, ...]:
    return tuple(word for word in record.get(key, "").split(",") if word)


def _allowed(record: Record, key: str) -> tuple[str, ...]:
    words = _words(record, key)
    return () if words == ("ALL",) else words
