"""Other Slurm releases for the lab: the root folders of other Debian systems, made once by debootstrap and kept.

They stand in $DDP_SLURM_RELEASES or ~/.cache/ddp_slurm/releases; remove that folder to make them anew.
"""

import fcntl
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ddp_slurm.lab.errors import LabError

PACKAGES = "slurmctld,slurmd,slurm-client,munge"


class ReleaseNotAvailable(LabError):
    """A release that this machine cannot get, with the reason."""


@dataclass(frozen=True)
class Release:
    """``suite`` of Debian has Slurm ``slurm``; older debootstraps know new suites only as ``script``."""

    slurm: str
    suite: str
    system: str
    script: str = "sid"


RELEASES = {
    release.slurm: release
    for release in (
        Release("20.11", "bullseye", "Debian 11", "bullseye"),
        Release("22.05", "bookworm", "Debian 12", "bookworm"),
        Release("24.11", "trixie", "Debian 13"),
        Release("26.05", "testing", "Debian testing"),
    )
}


def slurm_root(slurm: str) -> Path | None:
    """The root folder of a system with this Slurm release; None where it is this machine's own.

    Raises ReleaseNotAvailable where it cannot be made. Making one takes about a minute.
    """
    if slurm not in RELEASES:
        raise ReleaseNotAvailable(
            f"no Debian is known to have Slurm {slurm!r}; known are {', '.join(RELEASES)}"
        )
    if _version_in(None) == slurm:
        return None
    folder = Path(os.environ.get("DDP_SLURM_RELEASES") or Path.home() / ".cache/ddp_slurm/releases")
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / slurm
    with open(folder / f"{slurm}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            _debootstrap(RELEASES[slurm], root)
    found = _version_in(root)
    if found != slurm:
        raise ReleaseNotAvailable(f"{RELEASES[slurm].system} has Slurm {found or 'none'} now")
    return root


def _debootstrap(release: Release, root: Path) -> None:
    if os.geteuid() or not shutil.which("debootstrap"):
        raise ReleaseNotAvailable("debootstrap is not installed, or this is not root")
    unfinished, log = root.with_name(f"{root.name}.unfinished"), root.with_name(f"{root.name}.log")
    shutil.rmtree(unfinished, ignore_errors=True)
    # What it mounts there ends with it, also when it is killed.
    command = [
        "unshare",
        "--mount",
        "--",
        "debootstrap",
        "--variant=minbase",
        f"--include={PACKAGES}",
    ]
    command += [release.suite, str(unfinished), "", release.script]
    with open(log, "w") as output:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    if done.returncode:
        last = log.read_text().splitlines()[-1:]
        raise ReleaseNotAvailable(
            f"debootstrap of {release.system}: {''.join(last) or done.returncode}; see {log}"
        )
    for archive in (unfinished / "var/cache/apt/archives").glob("*.deb"):
        archive.unlink()
    (unfinished / "etc/hosts").touch()  # the lab's own hosts file is mounted on it
    log.unlink()
    unfinished.rename(root)


def _version_in(root: Path | None) -> str | None:
    """``22.05`` of the slurmd in a root folder, or of this machine."""
    command = ["chroot", str(root), "slurmd", "-V"] if root else ["slurmd", "-V"]
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
    except FileNotFoundError:
        return None
    match = re.search(r"([0-9]+\.[0-9]+)\.[0-9]+", done.stdout)
    return match[1] if match else None
