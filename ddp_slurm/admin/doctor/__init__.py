"""``ddp-slurm doctor``: what is wrong with the machines and their Slurm, why, and what to do."""

from .checks import CHECKS, as_json, diagnose, exit_status, table
from .finding import Finding, Severity
from .snapshot import Snapshot, look

__all__ = ["CHECKS", "Finding", "Severity", "Snapshot", "as_json", "diagnose", "exit_status", "look", "table"]
