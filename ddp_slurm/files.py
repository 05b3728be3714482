"""Files that are written completely or not at all."""

import os
import secrets
from pathlib import Path

from ddp_slurm import trust
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.user import name_of

MAX_LINKS = 40
"""Linux follows no more in one path (path_resolution(7))."""


def write_whole(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Replace the file ``path`` by one with this content: a reader sees the old or the new one.

    A text is encoded as UTF-8. A symbolic link of this user or of root is kept, and its target is
    replaced. Raises DdpSlurmError, with the path and the system's reason, also for another user's
    link.
    """
    try:
        if path.exists() and not path.is_file():  # replacing it would destroy a device or a pipe
            raise DdpSlurmError(f"{path}: cannot be written: it is not a regular file")
        target = own_target(path)
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        _replace(folder, target.name, content, mode)
    except OSError as error:
        raise DdpSlurmError(f"{path}: cannot be written: {error.strerror}") from None


def write_own(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """``write_whole`` into a folder that only this user and root can write.

    Follows no link: not even one that another user puts in the place of the folder meanwhile.
    Raises DdpSlurmError.
    """
    try:
        _replace(trust.open_folder(path.parent), path.name, content, mode)
    except OSError as error:
        raise DdpSlurmError(f"{path}: cannot be written: {error.strerror}") from None


def own_target(path: Path) -> Path:
    """The path at the end of a chain of links; ``path`` itself where it is none.

    Raises DdpSlurmError for a link of another user: it could lead to any file of this one.
    """
    target = path
    for _ in range(MAX_LINKS):
        if not target.is_symlink():
            return target
        owner = target.lstat().st_uid
        if not trust.is_ours(owner):
            raise DdpSlurmError(
                f"{path}: cannot be written: it is a link of another user, {name_of(owner)}; "
                "remove it, or name another file"
            )
        target = target.parent / os.readlink(target)
    raise DdpSlurmError(f"{path}: cannot be written: too many links")


def _replace(folder: int, name: str, content: str | bytes, mode: int) -> None:
    """Replace a file of a folder, whose descriptor is closed."""
    data = content.encode() if isinstance(content, str) else content
    temporary = f".{name}.{secrets.token_hex(4)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        handle = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise
    finally:
        os.close(folder)
