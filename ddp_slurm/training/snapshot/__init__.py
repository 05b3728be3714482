"""Snapshots that survive a kill at any moment, and need no shared disk."""

from ddp_slurm.training.snapshot.errors import SnapshotError
from ddp_slurm.training.snapshot.snapshot import Snapshot

__all__ = ["Snapshot", "SnapshotError"]
