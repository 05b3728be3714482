"""Command lines that run a program inside a node, or in the root of another Slurm release.

All mounts are made in a mount namespace of the process itself: they end with it, and nothing is
left to unmount.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from ddp_slurm.lab.network import NETNS_FOLDER

SCRIPT = Path(__file__).with_name("enter.sh")


def enter(
    argv: Sequence[str | os.PathLike[str]],
    *,
    etc: Path,
    netns: str | None = None,
    host: str = "",
    root: Path | None = None,
) -> list[str]:
    """The command line that runs ``argv`` in a network namespace under a host name.

    Args:
        etc: a folder with the lab's ``hosts`` and ``nsswitch.conf``, which replace those in /etc,
            and an empty folder ``root``.
        netns: the name of the network namespace; None stays in this one.
        host: the host name; empty keeps this machine's.
        root: the root of another system whose programs are run.
    """
    command = ["nsenter", f"--net={NETNS_FOLDER / netns}", "--"] if netns else []
    command += ["unshare", "--mount", "--propagation", "slave"]
    if host:
        command.append("--uts")
    command += ["--", "sh", "-eu", str(SCRIPT), str(etc), host, str(root or "")]
    return command + [os.fspath(arg) for arg in argv]
