"""Which files can be trusted: those that nobody but this user and root can write.

A folder that several users share may hold what another one has put there: a record that names a
process to end, a text that changes the screen, a link to a file of this user. Standard library
only: a look at a job needs no more.
"""

import os
import stat
from pathlib import Path

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.user import name_of, shares_group

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class TrustError(DdpSlurmError):
    """A file or folder that another user owns, can write, or leads elsewhere by a link."""


def is_ours(uid: int) -> bool:
    """Whether a file's owner is this user or root."""
    return uid in (0, os.geteuid())


def is_own_folder(path: Path) -> bool:
    """Whether it is a folder of this user that nobody else can write, or this user's link to one.

    Raises OSError.
    """
    info = path.stat()
    return (
        stat.S_ISDIR(info.st_mode)
        and info.st_uid == os.geteuid()
        and _problem(info) is None
        and is_ours(path.lstat().st_uid)
    )


def open_folder(path: Path) -> int:
    """The descriptor of a folder that only this user and root can write; no link is followed.

    Raises TrustError, or OSError.
    """
    return _open(path, os.O_RDONLY | os.O_DIRECTORY)


def make_folder(path: Path) -> None:
    """Make a folder that only this user can write, or take one, inside of a folder of that kind.

    Raises TrustError, or OSError.
    """
    path.mkdir(mode=0o755, exist_ok=True)
    if path.lstat().st_uid == os.geteuid() and not path.is_symlink():
        path.chmod(path.stat().st_mode & ~OTHERS_MAY_WRITE)  # made by another program's umask
    os.close(open_folder(path))


def read_text(path: Path) -> str:
    """The text of a file in a folder; both can only be written by this user and root.

    Raises TrustError, or OSError.
    """
    folder = open_folder(path.parent)
    try:
        handle = _open(path, os.O_RDONLY | os.O_NONBLOCK, folder)
    finally:
        os.close(folder)
    with open(handle, encoding="utf-8", errors="replace") as file:
        return file.read()


def _open(path: Path, flags: int, folder: int | None = None) -> int:
    """A descriptor of what ``path`` names, itself and no link. Raises TrustError, or OSError."""
    name = path if folder is None else path.name
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise TrustError(f"{path}: is a link, which is not followed here")
    handle = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    problem = _problem(os.fstat(handle))
    if problem is not None:
        os.close(handle)
        raise TrustError(f"{path}: {problem}")
    return handle


def _problem(info: os.stat_result) -> str | None:
    """Why something cannot be trusted."""
    if not is_ours(info.st_uid):
        return f"belongs to another user, {name_of(info.st_uid)}"
    by_group = info.st_mode & stat.S_IWGRP and shares_group(info.st_gid)
    if by_group or info.st_mode & stat.S_IWOTH:
        return (
            f"other users can write to it (mode {stat.S_IMODE(info.st_mode):04o}); "
            "if nobody has changed it: chmod -R go-w"
        )
    return None
