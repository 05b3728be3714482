"""Which Slurm release knows which line of its configuration, so that none is written that it refuses.

Sources: RELEASE_NOTES and the manual pages of each release; live daemons of 20.11, 22.05, 24.11 and 26.05.
"""

import re

from ddp_slurm.errors import DdpSlurmError

RELEASES = (
    "20.11",
    "21.08",
    "22.05",
    "23.02",
    "23.11",
    "24.05",
    "24.11",
    "25.05",
    "25.11",
    "26.05",
)
"""Oldest first. One srun over all components of a heterogeneous job begins with 20.11."""

DEFAULT_RELEASE = "22.05"

# Option, or option=value where the value is younger than the option.
INTRODUCED = {
    "20.11": """
        AccountingStorageHost AccountingStorageTRES AccountingStorageType AuthInfo AuthType ClusterName
        CommunicationParameters=EnableIPv6 CommunicationParameters
        DefMemPerCPU GresTypes HealthCheckInterval HealthCheckNodeState HealthCheckProgram JobAcctGatherType
        JobCompLoc JobCompType MailProg MpiDefault NodeName PartitionName PluginDir ProctrackType
        PropagateResourceLimitsExcept ReturnToService SchedulerParameters SchedulerType SelectType
        SelectTypeParameters SlurmUser SlurmctldHost SlurmctldLogFile SlurmctldParameters
        SlurmctldParameters=enable_configless SlurmctldPidFile SlurmctldPort SlurmdLogFile SlurmdParameters
        SlurmdPidFile SlurmdPort SlurmdSpoolDir SlurmdTimeout SrunPortRange StateSaveLocation TaskPlugin
        UnkillableStepTimeout
        CgroupAutomount CgroupReleaseAgentDir ConstrainCores ConstrainDevices ConstrainRAMSpace TaskAffinity
        DbdHost DbdPort LogFile PidFile PurgeJobAfter PurgeStepAfter
        StorageHost StorageLoc StorageType StorageUser SelectType=select/cons_res
    """,
    "21.08": "CgroupPlugin SlurmctldParameters=node_reg_mem_percent",
    "24.05": "CgroupPlugin=disabled",
}

REFUSED_FROM = {
    "CgroupAutomount": "22.05",
    "CgroupReleaseAgentDir": "22.05",
    "TaskAffinity": "22.05",
    "SelectType=select/cons_res": "23.11",
}


class SlurmReleaseError(DdpSlurmError):
    """A Slurm version that no configuration can be written for."""


def slurm_release(version: str) -> str:
    """The release of a version as Slurm prints it.

    >>> slurm_release("22.05.8"), slurm_release("slurm-wlm 24.11.5")
    ('22.05', '24.11')

    Raises SlurmReleaseError for a release older than 20.11, unknown ones and other text.
    """
    match = re.fullmatch(
        r"(?:slurm(?:-wlm)? )?([0-9]{2}\.[0-9]{2})(?:[.-][0-9A-Za-z.~+-]*)?", version
    )
    if not match:
        raise SlurmReleaseError(
            f"{version!r} is not a Slurm version, such as 22.05 or 22.05.8 ('slurmd -V' shows it)"
        )
    release = match[1]
    if release < RELEASES[0]:
        raise SlurmReleaseError(
            f"Slurm {version} cannot start one step over all parts of a heterogeneous job; {RELEASES[0]} or later can"
        )
    if release not in RELEASES:
        raise SlurmReleaseError(f"Slurm {version} is not known; known are {', '.join(RELEASES)}")
    return release


def known_options(release: str) -> frozenset[str]:
    """What may stand in this release's slurm.conf, gres.conf, cgroup.conf and slurmdbd.conf."""
    introduced = {
        option
        for since, names in INTRODUCED.items()
        if since <= release
        for option in names.split()
    }
    return frozenset(
        introduced - {option for option, since in REFUSED_FROM.items() if since <= release}
    )
