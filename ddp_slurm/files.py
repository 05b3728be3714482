"""Files that are written whole or not at all."""

import os
import tempfile
from pathlib import Path

from ddp_slurm.errors import DdpSlurmError


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Write ``text`` into ``path`` by way of a temporary file beside it: a reader sees the old file or the new one.

    A link stays, and what it points at is written. Raises DdpSlurmError, with the path and the system's reason.
    """
    try:
        if (
            path.exists() and not path.is_file()
        ):  # taking its place would destroy a device or a pipe
            raise DdpSlurmError(f"{path}: cannot be written: it is there and no regular file")
        path = Path(os.path.realpath(path))
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as fault:
        raise DdpSlurmError(f"{path}: cannot be written: {fault.strerror}") from None
