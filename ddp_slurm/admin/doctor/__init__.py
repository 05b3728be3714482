"""``ddp-slurm doctor``: what is wrong with the machines and their Slurm, why, and what to do."""

from ddp_slurm.admin.doctor.checks import CHECKS, as_json, diagnose, exit_status, table
from ddp_slurm.admin.doctor.finding import Finding, Severity
from ddp_slurm.admin.doctor.snapshot import Snapshot, look

__all__ = [
    "CHECKS",
    "Finding",
    "Severity",
    "Snapshot",
    "as_json",
    "diagnose",
    "exit_status",
    "look",
    "table",
]
