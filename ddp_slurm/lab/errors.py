"""What can go wrong in the lab."""

from ..errors import DdpSlurmError


class LabError(DdpSlurmError):
    """The lab cannot be started, found or taken down."""
