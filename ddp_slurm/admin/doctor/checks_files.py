"""Checks of files and limits of a machine that only a running job meets."""

import re
from collections.abc import Iterator

from ddp_slurm.admin.doctor.finding import Findings, error, warning
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.admin.facts import Facts
from ddp_slurm.hostlist import HostlistError, expand_hostlist

SMALL_SHM_KIB = 1024 * 1024
"""DataLoader workers hand batches over in /dev/shm, NCCL its buffers; containers have 64 MiB."""
LOWEST_OPEN_FILES = 1024
LOWEST_LOCKED_BYTES = 1024 * 1024
"""The old default of 64 KiB is less: NCCL cannot register memory for InfiniBand."""
DEVICE_PREFIXES = ("/dev/nvidia", "/dev/dri/render")
"""Of the device files that a node reports; those of a lab are somewhere else."""
CONTROLLERS = ("cpuset", "memory")
"""Of control groups, those that cgroup.conf's Constrain lines need on v1 and v2."""


def device_files(snapshot: Snapshot) -> Findings:
    """The device files of gres.conf exist, or slurmd does not start or hands out other cards."""
    for name, facts in snapshot.facts.items():
        listed = _listed_devices(name, facts)
        existing = facts.values.get("device", ())
        missing = [path for path in listed if path not in existing]
        if missing:
            cause = (
                f"gres.conf lists {', '.join(missing)}, which does not exist; "
                f"the machine has {', '.join(existing) or 'none'}"
            )
            fix = (
                "nvidia-modprobe -u -c=N makes one; if the numbers have moved: ddp-slurm cluster "
                "probe, then ddp-slurm cluster install"
            )
            yield error(name, cause, fix)


def _listed_devices(name: str, facts: Facts) -> list[str]:
    """The files of a node's lines of gres.conf, which has them as host lists."""
    found: list[str] = []
    for line in facts.block_lines("gres.conf"):
        words = dict(word.split("=", 1) for word in line.split("#")[0].split() if "=" in word)
        if "File" in words and name in _expanded(words.get("NodeName", name)):
            found += _expanded(words["File"])
    return [path for path in found if path.startswith(DEVICE_PREFIXES)]


def _expanded(text: str) -> list[str]:
    try:
        return list(expand_hostlist(text))
    except HostlistError:
        return []


def temporary_folders(snapshot: Snapshot) -> Findings:
    """Programs can be run from /tmp, and /dev/shm has room."""
    for name, facts in snapshot.facts.items():
        if facts.first("tmp_noexec"):
            cause = "/tmp is mounted noexec: torch.compile and pip run what they build there"
            yield warning(name, cause, "mount -o remount,exec /tmp, and in /etc/fstab")
        for line in facts.block_lines("disks")[1:]:
            columns = line.split(maxsplit=5)
            is_shm = len(columns) == 6 and columns[5] == "/dev/shm"
            if is_shm and columns[1].isdecimal() and int(columns[1]) < SMALL_SHM_KIB:
                cause = f"/dev/shm has {int(columns[1]) // 1024} MiB: DataLoader workers need more"
                yield warning(name, cause, "mount -o remount,size=50% /dev/shm, and in /etc/fstab")


def limits(snapshot: Snapshot) -> Findings:
    """slurmd may open files and lock memory: its jobs inherit both."""
    for name, facts in snapshot.facts.items():
        lines = facts.text("slurmd.limits")
        for title, lowest, unit, setting in (
            ("Max open files", LOWEST_OPEN_FILES, "files", "LimitNOFILE=131072"),
            ("Max locked memory", LOWEST_LOCKED_BYTES, "bytes", "LimitMEMLOCK=infinity"),
        ):
            match = re.search(rf"^{title} +(\d+)", lines, re.MULTILINE)
            if match and int(match[1]) < lowest:
                cause = f"slurmd runs with the limit {title[4:]} of {match[1]} {unit}"
                fix = f"systemctl edit slurmd: [Service] {setting}; then systemctl restart slurmd"
                yield warning(name, cause, fix)


def control_groups(snapshot: Snapshot) -> Findings:
    """The control groups with which Slurm keeps a job to its cores, memory and GPUs exist."""
    if snapshot.slurm_config.get("ProctrackType") != "proctrack/cgroup":
        return
    for name, facts in snapshot.facts.items():
        for missing in _missing_controllers(facts):
            cause = f"the control group {missing} does not exist: slurmd cannot limit jobs"
            fix = f"without cgroup_disable={missing} in the boot loader's line; then restart"
            if facts.first("cgroup") != "cgroup2fs":
                fix = f"mount -t cgroup -o {missing} cgroup /sys/fs/cgroup/{missing}; or {fix}"
            yield error(name, cause, fix)


def _missing_controllers(facts: Facts) -> Iterator[str]:
    present = (facts.first("cgroup_controllers") or "").split()
    # On v2 devices are limited by a program in the kernel, and the freezer is no controller.
    needed: tuple[str, ...] = CONTROLLERS
    if facts.first("cgroup") != "cgroup2fs":
        needed = (*CONTROLLERS, "devices", "freezer")
    if present:
        yield from (controller for controller in needed if controller not in present)
