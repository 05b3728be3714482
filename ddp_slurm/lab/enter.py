"""Command lines that run a program inside a node, or in the root file system of another Slurm release.

All mounts are made in a mount namespace of the process itself: they end with it, and nothing is left to unmount.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from ddp_slurm.lab.network import NETNS_FOLDER

# $0: folder with hosts and nsswitch.conf, $1: host name (may be empty), $2: root (may be empty), then the command.
_INSIDE = r"""
etc=$0 host=$1 root=$2
shift 2
if [ -n "$host" ]; then
    hostname "$host"
    mount -t sysfs sysfs /sys
fi
if [ -n "$root" ]; then
    mount -t tmpfs -o mode=755 tmpfs "$etc/root"
    # The release's own programs and libraries; all else, above all the work folders and /run, is the machine's.
    for path in "$root"/* /*; do
        name=${path##*/}
        case $path in
            "$root"/bin | "$root"/sbin | "$root"/lib* | "$root"/usr | "$root"/etc | "$root"/var) ;;
            "$root"/* | /bin | /sbin | /lib* | /usr | /etc | /var) continue ;;
        esac
        if [ -L "$path" ]; then
            ln -s "$(readlink "$path")" "$etc/root/$name"
        elif [ -d "$path" ]; then
            mkdir "$etc/root/$name"
            mount --rbind "$path" "$etc/root/$name"
        fi
    done
fi
# With a root also in the machine's /etc: a task may leave the root to run the machine's own Python.
[ -z "$host" ] || for name in hosts nsswitch.conf; do
    mount --bind "$etc/$name" "/etc/$name"
    [ -z "$root" ] || mount --bind "$etc/$name" "$etc/root/etc/$name"
done
[ -z "$root" ] || set -- chroot "$etc/root" env -C "$PWD" -- "$@"
exec "$@"
"""


def enter(
    argv: Sequence[str | os.PathLike[str]],
    *,
    etc: Path,
    netns: str | None = None,
    host: str = "",
    root: Path | None = None,
) -> list[str]:
    """The command line that runs ``argv`` in the network namespace ``netns`` under the host name ``host``.

    ``etc`` is a folder with the lab's ``hosts`` and ``nsswitch.conf`` (which stand in for those in /etc) and an empty
    folder ``root``; ``root`` is the root of another system whose programs are run.
    """
    network = ["nsenter", f"--net={NETNS_FOLDER / netns}", "--"] if netns else []
    private = ["unshare", "--mount", "--propagation", "slave", *(["--uts"] if host else []), "--"]
    shell = [
        "sh",
        "-euc",
        _INSIDE,
        str(etc),
        host,
        str(root or ""),
        *(os.fspath(arg) for arg in argv),
    ]
    return [*network, *private, *shell]
