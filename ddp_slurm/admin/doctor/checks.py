"""The list of all checks, and what they say together."""

from collections.abc import Callable, Mapping
from dataclasses import asdict

from ddp_slurm.admin.doctor import checks_machine, checks_slurm, checks_training
from ddp_slurm.admin.doctor.finding import Finding, Findings, Severity
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.console import table as aligned

CHECKS: Mapping[str, Callable[[Snapshot], Findings]] = {
    "reachable": checks_slurm.reachable,
    "host name": checks_machine.host_name,
    "name resolution": checks_machine.name_resolution,
    "firewall": checks_slurm.firewall,
    "clock": checks_machine.clock,
    "users": checks_machine.users,
    "munge key": checks_slurm.munge_key,
    "Slurm release": checks_slurm.release,
    "cgroup plugin": checks_slurm.cgroup,
    "slurmctld": checks_slurm.controller,
    "configuration": checks_slurm.configuration,
    "hardware": checks_machine.hardware,
    "GPU driver": checks_machine.driver,
    "GPU count": checks_machine.gpu_count,
    "node states": checks_slurm.node_states,
    "torch": checks_training.importable,
    "versions": checks_training.versions,
    "driver branch": checks_training.driver_branch,
    "cards served": checks_training.served_cards,
    "glibc": checks_training.libc,
}
"""In the order in which faults are worth mending: what stands above often causes what stands below."""


def diagnose(snapshot: Snapshot) -> list[Finding]:
    """The findings of every check, one that all is well where a check found nothing."""
    findings = []
    for name, check in CHECKS.items():
        said = [
            Finding(name, severity, nodes, cause, fix)
            for severity, nodes, cause, fix in check(snapshot)
        ]
        findings += said or [Finding(name, Severity.OK, tuple(snapshot.facts))]
    return findings


def exit_status(findings: list[Finding]) -> int:
    """0 where nothing is wrong, 1 with warnings, 2 with errors."""
    return max(0, *(int(finding.severity) for finding in findings))


def table(findings: list[Finding]) -> str:
    """A line a finding: severity, check, nodes, cause, and the cure behind an arrow."""
    rows = []
    for f in findings:
        word = f.severity.name.lower()
        where = "" if f.severity is Severity.OK else ",".join(f.nodes)
        rows.append((word, f.check, where, f.cause + (f" -> {f.fix}" if f.fix else "")))
    return f"{aligned(rows)}\n"


def as_json(findings: list[Finding]) -> dict[str, object]:
    """For other programs: the findings with the severity's name, and the exit status."""
    return {
        "status": exit_status(findings),
        "findings": [
            asdict(finding) | {"severity": finding.severity.name.lower()} for finding in findings
        ],
    }
