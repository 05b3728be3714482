"""The exception of all modules here."""

from ddp_slurm.errors import DdpSlurmError


class SnapshotError(DdpSlurmError):
    """A snapshot that cannot be written or read."""
