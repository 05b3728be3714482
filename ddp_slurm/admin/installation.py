"""Where a Slurm keeps its files and how its machines are reached: users' machines, or a lab's."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Installation:
    """Paths, ports and users of one Slurm. Slurm replaces ``%n`` in paths by the node's name."""

    state_dir: str
    spool_dir: str
    log_dir: str
    run_dir: str
    munge_socket: str | None = None
    """None: munge's own default."""
    controller: str | None = None
    """The host of slurmctld; None: the cluster's controller node."""
    controller_address: str | None = None
    slurm_user: str = "root"
    slurmctld_port: int = 6817
    slurmd_port: int = 6818
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Node name -> address, before those of cluster.yaml."""
    gpu_device_prefix: str = "/dev/nvidia"
    """The device files are PREFIX0, PREFIX1, ..."""
    scheduler_parameters: tuple[str, ...] = ()
    """In addition to those of every cluster."""
    is_lab: bool = False
    """Several hosts share one machine: its kernel, control groups and device files."""


USERS_MACHINES = Installation(
    state_dir="/var/lib/slurm/slurmctld",
    spool_dir="/var/lib/slurm/slurmd",
    log_dir="/var/log/slurm",
    run_dir="/run",
    slurm_user="slurm",
)
"""Where Debian's and Ubuntu's packages keep their files."""
