"""Which Slurm release accepts which line of its configuration.

Sources: RELEASE_NOTES and the manual pages of each release; live daemons of 20.11, 22.05, 24.11 and
26.05.
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
"""Oldest first. Before 20.02 no node can fetch its configuration, and het jobs are packjobs."""

DEFAULT_RELEASE = "22.05"
FIRST_WITH_CGROUP_V2 = "22.05"

INTRODUCED = {
    "20.11": """
        AccountingStorageHost AccountingStorageTRES AccountingStorageType AuthInfo AuthType
        CgroupAutomount CgroupReleaseAgentDir ClusterName CommunicationParameters
        CommunicationParameters=EnableIPv6 ConstrainCores ConstrainDevices ConstrainRAMSpace
        DbdHost DbdPort DefMemPerCPU GresTypes HealthCheckInterval HealthCheckNodeState
        HealthCheckProgram JobAcctGatherType JobCompLoc JobCompType LogFile MailProg MpiDefault
        NodeName PartitionName PidFile PluginDir ProctrackType PropagateResourceLimitsExcept
        PurgeJobAfter PurgeStepAfter ReturnToService SchedulerParameters SchedulerType
        SelectType SelectType=select/cons_res SelectTypeParameters SlurmUser SlurmctldHost
        SlurmctldLogFile SlurmctldParameters SlurmctldParameters=enable_configless
        SlurmctldPidFile SlurmctldPort SlurmdLogFile SlurmdParameters SlurmdPidFile SlurmdPort
        SlurmdSpoolDir SlurmdTimeout SrunPortRange StateSaveLocation StorageHost StorageLoc
        StorageType StorageUser TaskAffinity TaskPlugin UnkillableStepTimeout
    """,
    "21.08": "CgroupPlugin SlurmctldParameters=node_reg_mem_percent",
    "24.05": "CgroupPlugin=disabled",
}
"""Options by the release that introduced them; option=value where the value is newer."""

REFUSED_FROM = {
    "CgroupAutomount": "22.05",
    "CgroupReleaseAgentDir": "22.05",
    "TaskAffinity": "22.05",
    "SelectType=select/cons_res": "23.11",
}
"""Options by the first release that refuses them."""


class SlurmReleaseError(DdpSlurmError):
    """A Slurm version for which no configuration can be written."""


def slurm_release(version: str) -> str:
    """The release of a version as Slurm prints it.

    Raises SlurmReleaseError for a release older than 20.11, unknown ones and other text.

    >>> slurm_release("22.05.8"), slurm_release("slurm-wlm 24.11.5")
    ('22.05', '24.11')
    """
    pattern = r"(?:slurm(?:-wlm)? )?([0-9]{2}\.[0-9]{2})(?:[.-][0-9A-Za-z.~+-]*)?"
    match = re.fullmatch(pattern, version)
    if not match:
        raise SlurmReleaseError(
            f"{version!r} is not a Slurm version; expected for example 22.05 or 22.05.8 "
            "('slurmd -V' prints it)"
        )
    release = match[1]
    if release < RELEASES[0]:
        raise SlurmReleaseError(
            f"Slurm {version} is too old; {RELEASES[0]} is the oldest supported"
        )
    if release not in RELEASES:
        raise SlurmReleaseError(
            f"Slurm {version} is not supported; supported are {', '.join(RELEASES)}"
        )
    return release


def known_options(release: str) -> frozenset[str]:
    """What this release accepts in slurm.conf, gres.conf, cgroup.conf and slurmdbd.conf."""
    options: set[str] = set()
    for since, names in INTRODUCED.items():
        if since <= release:
            options.update(names.split())
    refused = {option for option, since in REFUSED_FROM.items() if since <= release}
    return frozenset(options - refused)
