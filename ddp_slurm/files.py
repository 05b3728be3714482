"""Files that are written completely or not at all."""

import os
import tempfile
from pathlib import Path

from ddp_slurm.errors import DdpSlurmError


def write_whole(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Replace the file ``path`` by one with this content: a reader sees the old or the new one.

    A text is encoded as UTF-8. A symbolic link is kept, and its target is replaced. Raises
    DdpSlurmError, with the path and the system's reason.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():  # replacing it would destroy a device or a pipe
            raise DdpSlurmError(f"{path}: cannot be written: it is not a regular file")
        _replace(Path(os.path.realpath(path)), data, mode)
    except OSError as error:
        raise DdpSlurmError(f"{path}: cannot be written: {error.strerror}") from None


def _replace(path: Path, data: bytes, mode: int) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
