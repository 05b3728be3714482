"""The doctor's check of node states: what keeps jobs away, by Slurm's own words."""

import pytest

from ddp_slurm.admin.doctor.checks_slurm import node_states
from ddp_slurm.admin.doctor.finding import Finding, Severity
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.admin.facts import Block, Facts
from ddp_slurm.cluster import Cluster, Node

RECORD = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1
   Gres=gpu:a100:4
   RealMemory=30720 Sockets=8
   State={state} ThreadsPerCore=1
   Comment={comment}
   Reason={reason}
"""


def findings(
    state: str, reason: str = "(null)", comment: str = "(null)", node: str = "n1"
) -> list[Finding]:
    text = RECORD.format(state=state, reason=reason, comment=comment)
    facts = Facts({}, {"slurm.nodes": (Block(0, text),)})
    return list(node_states(Snapshot(Cluster("lab", (Node(node),)), {node: facts})))


@pytest.mark.parametrize(
    "state",
    [
        "IDLE",
        "IDLE+POWERED_DOWN",
        "IDLE+CLOUD+POWERED_DOWN",
        "IDLE+CLOUD+POWER",
        "IDLE~",
        "MIXED+CLOUD+NOT_RESPONDING+POWERING_UP",
        "IDLE+POWERING_DOWN",
        "ALLOCATED+RESERVED",
        "IDLE+PLANNED",
        "IDLE+REBOOT_REQUESTED",
    ],
)
def test_node_that_takes_jobs_is_no_finding(state: str) -> None:
    assert findings(state, comment="State=DOWN NodeName=n2", reason="(null)") == []


@pytest.mark.parametrize(
    ("state", "reason", "severity", "cause"),
    [
        ("IDLE+MAINTENANCE+RESERVED", "(null)", Severity.WARNING, "maintenance reservation"),
        ("MAINT", "(null)", Severity.WARNING, "maintenance reservation"),
        ("IDLE+DRAIN", "fan State=IDLE [ann@2026-11-28T00:00:00]", Severity.WARNING, "(by ann)"),
        ("DOWN+POWERED_DOWN", "ResumeTimeout reached [slurm@2026]", Severity.ERROR, "(by slurm)"),
        ("IDLE+INVALID_REG", "gres/gpu count reported lower", Severity.ERROR, "count reported"),
        ("IDLE*", "(null)", Severity.ERROR, "Slurm gives no reason"),
    ],
)
def test_node_that_takes_no_jobs(state: str, reason: str, severity: Severity, cause: str) -> None:
    (finding,) = findings(state, reason)
    assert (finding.severity, finding.nodes) == (severity, ("n1",))
    assert cause in finding.cause


def test_node_that_slurm_does_not_have() -> None:
    (finding,) = findings("IDLE", comment="x NodeName=n2 State=IDLE", node="n2")
    assert finding.cause == "this node is not in slurm.conf"
