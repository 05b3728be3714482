"""The room's own exception."""

from ddp_slurm.errors import DdpSlurmError


class DataSetError(DdpSlurmError):
    """A data set that cannot be prepared, served or fetched."""
