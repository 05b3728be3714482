"""Checks of the machines: hardware against the configuration, drivers, clocks, names."""

import re
from collections.abc import Iterator

from ddp_slurm.admin.doctor.finding import Finding, Findings, error, skipped, warning
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.admin.facts import Facts, Topology
from ddp_slurm.admin.gpus import nvidia_warning
from ddp_slurm.cluster import Node
from ddp_slurm.slurm_client.records import NodeRecord

PROBE = "ddp-slurm cluster probe, then ddp-slurm cluster install"
CLOCK = "ddp-slurm cluster install --step clock; chronyc makestep sets a clock at once"
CLOCK_WARNING_SECONDS = 5.0
CLOCK_ERROR_SECONDS = 60.0
"""munge refuses at 300 s; a clock that is a minute off will get there, and file times are wrong."""

DISK_ERROR_KIB = 100 * 1024
"""slurmctld's state and a job's scripts need a part of it; so do DataLoader workers in /dev/shm."""


def hardware(snapshot: Snapshot) -> Findings:
    """No node has less memory or fewer cores than configured; slurmd would be drained."""
    parameters = snapshot.slurm_config.get("SlurmdParameters", "")
    is_checked_by_slurm = "config_overrides" not in parameters
    for node, facts in snapshot.responding():
        causes = [*_excesses("cluster.yaml", node, node.memory_mb, facts)]
        seen = snapshot.slurm_nodes.get(node.name)
        if seen and is_checked_by_slurm:
            causes += _excesses("slurm.conf", seen, seen.real_memory_mb, facts)
        for cause in causes:
            yield error(node.name, cause, PROBE)


def _cores(source: Node | NodeRecord | Topology | None) -> int | None:
    if source is None or not source.sockets or not source.cores_per_socket:
        return None
    return source.sockets * source.cores_per_socket


def _excesses(
    source: str, node: Node | NodeRecord, memory_mb: int | None, facts: Facts
) -> Iterator[str]:
    """Where a file gives a node more than the machine has."""
    for configured, found, unit in (
        (memory_mb, facts.memory_mb, "MiB of memory"),
        (node.cpus, facts.cpus, "CPUs"),
        (_cores(node), _cores(facts.topology), "cores"),
    ):
        if configured and found is not None and configured > found:
            yield f"{source} has {configured} {unit}, the machine {found}"


def gpu_count(snapshot: Snapshot) -> Findings:
    """Every node has exactly the GPUs that are configured."""
    for node, facts in snapshot.responding():
        if facts.nvidia_error:
            continue
        configured = {"cluster.yaml": node.gpu_count}
        if node.name in snapshot.slurm_nodes:
            configured["slurm.conf"] = snapshot.slurm_nodes[node.name].gpus
        tools = [tool for tool in ("nvidia-smi", "amd-smi", "rocm-smi") if tool in facts.blocks]
        if tools:
            yield from _count_findings(node.name, configured, len(facts.gpus), tools[0])
        elif any(configured.values()):
            cause = "GPUs are configured, but there is no nvidia-smi (or amd-smi): no driver"
            yield error(node.name, cause, "install the driver")


def _count_findings(
    node: str, configured: dict[str, int], found: int, tool: str
) -> Iterator[Finding]:
    for source, count in configured.items():
        cause = f"{source} has {count} GPUs, {tool} shows {found}"
        if count > found:
            fix = f"look for the missing card (dmesg); if it is gone: {PROBE}"
            yield error(node, cause, fix)
        elif count < found:
            yield warning(node, cause, PROBE)


def driver(snapshot: Snapshot) -> Findings:
    """The driver works, and its kernel module and library have one version.

    After an upgrade without a restart they differ.
    """
    for name, facts in snapshot.facts.items():
        failure = f"nvidia-smi: {facts.nvidia_error}" if facts.nvidia_error else None
        module = _kernel_module_version(facts)
        libraries = [gpu.driver for gpu in facts.gpus if gpu.vendor == "nvidia"]
        if module and libraries and module != libraries[0]:
            failure = f"kernel module {module}, library {libraries[0]}"
        if failure:
            fix = (
                f"drain {name} and restart it; exclude the driver's packages from automatic "
                "upgrades (see the guide)"
            )
            yield error(name, failure, fix)
            continue
        block = facts.block("nvidia-smi")
        complaint = nvidia_warning(*block) if block else None
        if complaint:
            fix = "jobs can run on the card; have its vendor check it"
            yield warning(name, f"nvidia-smi: {complaint}", fix)
        for index in facts.undivided_mig_cards:
            cause = f"MIG is enabled on GPU {index}, but it has no instances: no job can use it"
            fix = f"nvidia-smi mig -i {index} -cgi PROFILES -C, or nvidia-smi -i {index} -mig 0"
            yield error(name, cause, fix)


def _kernel_module_version(facts: Facts) -> str | None:
    # "Kernel Module  535.183.01  Sun", or "Open Kernel Module for x86_64  580.159.04  Release"
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", facts.text("nvidia.module"))
    return match[1] if match else None


def clock(snapshot: Snapshot) -> Findings:
    """All clocks agree. A difference that the network's delay may explain is not counted."""
    offsets: dict[str, float] = {}
    for name, facts in snapshot.facts.items():
        if facts.clock_offset_seconds is not None:
            offsets[name] = facts.clock_offset_seconds
    if not offsets:
        yield skipped("no node reported its time")
        return
    # Against the nodes' own median: the clock of the asking machine may be the wrong one.
    median = sorted(offsets.values())[len(offsets) // 2]
    for name, offset in offsets.items():
        difference = abs(offset - median)
        certain = difference - snapshot.facts[name].clock_error_seconds
        side = "ahead of" if offset > median else "behind"
        cause = f"the clock is {difference:.0f} s {side} the other nodes'"
        if certain > CLOCK_ERROR_SECONDS:
            yield error(name, cause, CLOCK)
        elif certain > CLOCK_WARNING_SECONDS:
            yield warning(name, cause, CLOCK)
    for name, facts in snapshot.facts.items():
        match = re.search(r"Expired|Rewound", facts.text("unmunge"))
        if match:
            cause = f"munge: {match[0]} credential, the clocks differ by minutes"
            yield error(name, cause, CLOCK)


def host_name(snapshot: Snapshot) -> Findings:
    """A node's host name is what slurmd looks for in slurm.conf: NodeHostName, mostly NodeName.

    Otherwise slurmd stops: "Unable to determine this slurmd's NodeName".
    """
    for name, facts in snapshot.facts.items():
        record = snapshot.slurm_nodes.get(name)
        expected = (record and record.host_name) or name
        found = facts.first("hostname") or expected
        # slurmd tries the short name, the full one and aliases
        if not {found, facts.host} & {expected, expected.split(".")[0]}:
            yield error(
                name,
                f"the machine's host name is {facts.host!r}, which is not in slurm.conf",
                f"on it: hostnamectl set-hostname {expected}, then restart slurmd",
            )


def disks(snapshot: Snapshot) -> Findings:
    """The folders of Slurm's state, logs and job scripts, /tmp and /dev/shm have space left."""
    for name, facts in snapshot.facts.items():
        full = []
        for line in facts.block_lines("disks")[1:]:
            columns = line.split(maxsplit=5)
            if len(columns) == 6 and columns[3].isdecimal() and int(columns[3]) < DISK_ERROR_KIB:
                full.append(columns[5])
        if full:
            paths = ", ".join(dict.fromkeys(full))
            cause = f"less than {DISK_ERROR_KIB // 1024} MiB are free on {paths}"
            yield error(name, cause, f"on it: du -xh --max-depth=1 {full[0]}")
