"""Checks of the machines: hardware against the configuration, drivers, clocks, users, names."""

import math
import re

from ddp_slurm.admin.doctor.finding import Findings, Severity
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.admin.facts import Facts
from ddp_slurm.admin.gpus import nvidia_fault

PROBE = "ddp-slurm cluster probe, then ddp-slurm cluster install"
CLOCK_WARNING_SECONDS = 5.0
CLOCK_ERROR_SECONDS = 60.0
"""munge refuses at 300 s; a clock that is a minute off is on its way there, and file times already mislead."""

Claim = tuple[str, int, int | None, str]


def hardware(snapshot: Snapshot) -> Findings:
    """No node has less memory or fewer cores than it is said to have; slurmd would register it as drained."""
    overrides = "config_overrides" in snapshot.slurm_config.get("SlurmdParameters", "")
    for node in snapshot.cluster.nodes:
        facts = snapshot.facts.get(node.name)
        if facts is None:
            continue
        claims = _claims(
            "cluster.yaml", facts, node.memory_mb, node.cpus, (node.sockets, node.cores_per_socket)
        )
        seen = snapshot.slurm_nodes.get(node.name)
        if seen and not overrides:
            topology = (seen.sockets, seen.cores_per_socket)
            claims += _claims("slurm.conf", facts, seen.real_memory_mb, seen.cpus, topology)
        for what, claimed, found, unit in claims:
            if found is not None and claimed > found:
                yield (
                    Severity.ERROR,
                    (node.name,),
                    f"{what} says {claimed} {unit}, the machine has {found}",
                    PROBE,
                )


def _claims(
    source: str,
    facts: Facts,
    memory_mb: int | None,
    cpus: int | None,
    topology: tuple[int | None, int | None],
) -> list[Claim]:
    claims: list[Claim] = []
    if memory_mb:
        claims.append((source, memory_mb, facts.memory_mb, "MiB of memory"))
    if cpus:
        claims.append((source, cpus, facts.cpus, "CPUs"))
    found = facts.topology
    if all(topology) and found:
        cores = math.prod(number or 0 for number in topology)
        claims.append((source, cores, found.sockets * found.cores_per_socket, "cores"))
    return claims


def gpu_count(snapshot: Snapshot) -> Findings:
    """Every node has the GPUs it is said to have, no more and no fewer."""
    for node in snapshot.cluster.nodes:
        facts = snapshot.facts.get(node.name)
        if facts is None or _driver_fault(facts):
            continue
        said = {"cluster.yaml": node.gpu_count}
        if node.name in snapshot.slurm_nodes:
            said["slurm.conf"] = snapshot.slurm_nodes[node.name].gpus
        tools = [tool for tool in ("nvidia-smi", "amd-smi", "rocm-smi") if tool in facts.blocks]
        if not tools:
            if any(said.values()):
                yield (
                    Severity.ERROR,
                    (node.name,),
                    "has GPUs, but no nvidia-smi (or amd-smi): no driver",
                    "install the driver",
                )
            continue
        found = len(facts.gpus)
        for source, count in said.items():
            if count != found:
                yield (
                    Severity.ERROR if count > found else Severity.WARNING,
                    (node.name,),
                    f"{source} says {count} GPUs, {tools[0]} shows {found}",
                    PROBE
                    if count < found
                    else f"look for the missing card (dmesg); if it is gone: {PROBE}",
                )


def _driver_fault(facts: Facts) -> str | None:
    block = facts.block("nvidia-smi")
    return nvidia_fault(block.status, block.text) if block else None


def driver(snapshot: Snapshot) -> Findings:
    """The driver's module in the kernel and its library are of one version; an upgrade without a restart parts them."""
    for name, facts in snapshot.facts.items():
        restart = f"drain {name}, restart it; hold the driver's packages against automatic upgrades (see the guide)"
        fault = _driver_fault(facts)
        if fault:
            yield Severity.ERROR, (name,), f"nvidia-smi: {fault}", restart
            continue
        block = facts.block("nvidia.module")
        module = (
            re.search(r"Kernel Module\D*?\s(\d+\.\d+(?:\.\d+)?)\s", block.text) if block else None
        )
        library = next((gpu.driver for gpu in facts.gpus if gpu.vendor == "nvidia"), None)
        if module and library and module[1] != library:
            yield Severity.ERROR, (name,), f"kernel module {module[1]}, library {library}", restart


def clock(snapshot: Snapshot) -> Findings:
    """All clocks agree. What the network's delay may explain is not counted."""
    offsets = {
        n: f.clock_offset_seconds
        for n, f in snapshot.facts.items()
        if f.clock_offset_seconds is not None
    }
    if not offsets:
        yield Severity.SKIPPED, (), "no node told its time", ""
        return
    # Against the nodes' own middle: the machine that asks may be the one whose clock is wrong.
    middle = sorted(offsets.values())[len(offsets) // 2]
    fix = "ddp-slurm cluster install --step clock; chronyc makestep sets a clock at once"
    for name, offset in offsets.items():
        off = abs(offset - middle) - snapshot.facts[name].clock_error_seconds
        if off > CLOCK_WARNING_SECONDS:
            severity = Severity.ERROR if off > CLOCK_ERROR_SECONDS else Severity.WARNING
            side = "ahead of" if offset > middle else "behind"
            yield (
                severity,
                (name,),
                f"the clock is {abs(offset - middle):.0f} s {side} the other nodes'",
                fix,
            )
    for name, facts in snapshot.facts.items():
        block = facts.block("unmunge")
        word = re.search(r"Expired|Rewound", block.text) if block else None
        if word:
            yield (
                Severity.ERROR,
                (name,),
                f"munge: {word[0]} credential, the clocks differ by minutes",
                fix,
            )


def users(snapshot: Snapshot) -> Findings:
    """A name has one id on all nodes, and who may run jobs is known on all."""
    ids: dict[str, dict[str, list[str]]] = {}
    for name, facts in snapshot.facts.items():
        block = facts.block("users")
        for line in (block.text if block else "").splitlines():
            fields = line.split(":")
            if len(fields) >= 7 and _matters(fields):
                ids.setdefault(fields[0], {}).setdefault(fields[2], []).append(name)
    for user, nodes_of_id in ids.items():
        there = [name for names in nodes_of_id.values() for name in names]
        missing = tuple(
            name
            for name in snapshot.facts
            if name not in there and snapshot.facts[name].block("users")
        )
        daemon = user in ("munge", "slurm")
        fix = (
            "ddp-slurm cluster install --step users"
            if daemon
            else f"useradd -u ID {user}, the same ID on all nodes"
        )
        if len(nodes_of_id) > 1:
            odd = min(nodes_of_id.values(), key=len)
            listed = ", ".join(f"{uid} on {', '.join(names)}" for uid, names in nodes_of_id.items())
            yield Severity.ERROR, tuple(odd), f"user {user} has different ids: {listed}", fix
        elif missing and (daemon or len(there) > 1):
            severity = Severity.ERROR if daemon else Severity.WARNING
            yield severity, missing, f"user {user} (id {next(iter(nodes_of_id))}) is missing", fix


def _matters(fields: list[str]) -> bool:
    """munge, slurm, and people: a login shell and an id of the range that adduser takes for them."""
    person = fields[2].isdigit() and 1000 <= int(fields[2]) < 60000
    return fields[0] in ("munge", "slurm") or (
        person and not fields[6].endswith(("nologin", "false"))
    )


def host_name(snapshot: Snapshot) -> Findings:
    """A node calls itself what slurm.conf calls it: "Unable to determine this slurmd's NodeName" otherwise."""
    for name, facts in snapshot.facts.items():
        if facts.host and facts.host != name:
            cause = (
                f"the machine calls itself {facts.host!r}; slurmd does not find that in slurm.conf"
            )
            yield (
                Severity.ERROR,
                (name,),
                cause,
                f"on it: hostnamectl set-hostname {name}, then restart slurmd",
            )


def name_resolution(snapshot: Snapshot) -> Findings:
    """Names lead to the same address everywhere, and never to a loopback one, where no other rank can come."""
    known: dict[str, dict[tuple[str, ...], list[str]]] = {}
    fix = "ddp-slurm cluster install --step hosts"
    for name, facts in snapshot.facts.items():
        for line in facts.values.get("resolves", ()):
            target, *addresses = line.split()
            if target in snapshot.facts and not addresses:
                yield Severity.WARNING, (name,), f"the name {target} has no address here", fix
            loopback = [
                address for address in addresses if address.startswith("127.") or address == "::1"
            ]
            if loopback and len(snapshot.cluster.nodes) > 1:
                yield (
                    Severity.ERROR,
                    (name,),
                    f"the name {target} is {loopback[0]} here (see /etc/hosts)",
                    fix,
                )
            elif addresses:
                known.setdefault(target, {}).setdefault(tuple(sorted(set(addresses))), []).append(
                    name
                )
    for target, answers in known.items():
        if len(answers) > 1:
            odd = min(answers.values(), key=len)
            listed = "; ".join(
                f"{' '.join(a)} on {', '.join(names)}" for a, names in answers.items()
            )
            yield (
                Severity.WARNING,
                tuple(odd),
                f"the name {target} has different addresses: {listed}",
                fix,
            )
