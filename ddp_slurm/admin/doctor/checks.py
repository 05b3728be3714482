"""The list of all checks, and their results together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from ddp_slurm.admin.doctor import (
    checks_files,
    checks_machine,
    checks_munge,
    checks_network,
    checks_partitions,
    checks_slurm,
    checks_training,
    checks_users,
)
from ddp_slurm.admin.doctor.finding import Finding, Findings, Severity, skipped
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.console import table as aligned

CHECKS: Mapping[str, Callable[[Snapshot], Findings]] = {
    "reachable": checks_slurm.reachable,
    "host name": checks_machine.host_name,
    "name resolution": checks_network.name_resolution,
    "DNS": checks_network.dns,
    "interface": checks_network.interface,
    "packet size": checks_network.packet_size,
    "firewall": checks_network.firewall,
    "clock": checks_machine.clock,
    "disks": checks_machine.disks,
    "temporary folders": checks_files.temporary_folders,
    "users": checks_users.users,
    "munge key": checks_munge.munge_key,
    "Slurm release": checks_slurm.release,
    "cgroup plugin": checks_slurm.cgroup,
    "control groups": checks_files.control_groups,
    "slurmctld": checks_slurm.controller,
    "slurmd": checks_slurm.daemons,
    "limits": checks_files.limits,
    "configuration": checks_slurm.configuration,
    "hardware": checks_machine.hardware,
    "GPU driver": checks_machine.driver,
    "GPU count": checks_machine.gpu_count,
    "device files": checks_files.device_files,
    "node states": checks_slurm.node_states,
    "partitions": checks_partitions.partitions,
    "GPU types": checks_partitions.gpu_types,
    "reservations": checks_partitions.reservations,
    "torch": checks_training.importable,
    "torch's CUDA": checks_training.cuda,
    "versions": checks_training.versions,
    "driver branch": checks_training.driver_branch,
    "cards served": checks_training.served_cards,
    "glibc": checks_training.libc,
    "cards compute": checks_training.cards_compute,
    "all-reduce": checks_training.all_reduce,
}
"""In the order in which to fix errors: one check's error often causes those of later checks."""


def diagnose(snapshot: Snapshot) -> list[Finding]:
    """The findings of every check; one with ``Severity.OK`` where a check found nothing."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        own = list(check(snapshot))
        if not own and not snapshot.facts:
            own = [skipped("no node responded")]
        if not own:
            own = [Finding(Severity.OK, tuple(snapshot.facts))]
        findings += [replace(finding, check=name) for finding in own]
    return findings


def exit_status(findings: Sequence[Finding]) -> int:
    """0 where nothing is wrong, 1 with warnings, 2 with errors."""
    return max(0, *(int(finding.severity) for finding in findings))


def table(findings: Sequence[Finding]) -> str:
    """A line a finding: severity, check, nodes, cause, and the fix behind an arrow.

    Where all nodes responded, "ok" means all of them, and none is named.
    """
    rows = []
    some_are_silent = any(
        f.check == "reachable" and f.severity is not Severity.OK for f in findings
    )
    for finding in findings:
        is_ok = finding.severity is Severity.OK
        nodes = "" if is_ok and not some_are_silent else ",".join(finding.nodes)
        text = f"{finding.cause} -> {finding.fix}" if finding.fix else finding.cause
        rows.append((finding.severity.name.lower(), finding.check, nodes, text))
    return f"{aligned(rows)}\n"


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """For other programs: the findings with the severity's name, and the exit status."""
    items = []
    for finding in findings:
        item = asdict(finding)
        item["severity"] = finding.severity.name.lower()
        items.append(item)
    return {"status": exit_status(findings), "findings": items}
