"""Other Slurm releases for the lab: root folders of other Debian systems.

debootstrap makes each once. They are kept in $DDP_SLURM_RELEASES or ~/.cache/ddp_slurm/releases;
remove that folder to make them again.
"""

import fcntl
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from ddp_slurm.ask import ask
from ddp_slurm.lab.errors import LabError
from ddp_slurm.lab.machine import with_system_programs

PACKAGES = "slurmctld,slurmd,slurm-client,munge"


class ReleaseNotAvailable(LabError):
    """A release that this machine cannot get, with the reason."""


@dataclass(frozen=True)
class Release:
    """The Debian that has a release of Slurm."""

    suite: str
    """debootstrap's name of the Debian."""
    system: str
    """Its name for people."""
    script: str = "sid"
    """debootstrap's script: an old debootstrap has none for a new suite."""


RELEASES = {
    "20.11": Release("bullseye", "Debian 11", "bullseye"),
    "22.05": Release("bookworm", "Debian 12", "bookworm"),
    "24.11": Release("trixie", "Debian 13"),
    "26.05": Release("testing", "Debian testing"),
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
    """Make the root folder, whole or not at all."""
    if os.geteuid() or not shutil.which("debootstrap"):
        raise ReleaseNotAvailable("debootstrap is not installed, or this is not root")
    unfinished = root.with_name(f"{root.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}"]
    command += [release.suite, str(unfinished), "", release.script]
    # In a mount namespace: what debootstrap mounts ends with it, also when it is killed.
    answer = ask(["unshare", "--mount", "--", *command])
    if answer.status:
        log = root.with_name(f"{root.name}.log")
        log.write_text(answer.out + answer.err)
        last_line = answer.out.strip().rpartition("\n")[2] or answer.text or str(answer.status)
        raise ReleaseNotAvailable(f"debootstrap of {release.system}: {last_line}; see {log}")
    for archive in (unfinished / "var/cache/apt/archives").glob("*.deb"):
        archive.unlink()
    (unfinished / "etc/hosts").touch()  # the lab's own hosts file is mounted on it
    unfinished.rename(root)


def _version_in(root: Path | None) -> str | None:
    """``22.05`` of the slurmd in a root folder, or of this machine."""
    enter_root = ["chroot", str(root)] if root else []
    answer = ask([*enter_root, "slurmd", "-V"], environ=with_system_programs(os.environ))
    match = re.search(r"([0-9]+\.[0-9]+)\.[0-9]+", answer.out)
    return match[1] if match else None
