"""What can go wrong in the lab."""

from ddp_slurm.errors import DdpSlurmError


class LabError(DdpSlurmError):
    """The lab cannot be started, found or taken down."""
