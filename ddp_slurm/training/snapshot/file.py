"""The bytes of a snapshot: what ``torch.save`` writes, and a digest over all of it at the end.

The digest is the comment of the zip file, so that ``torch.load(path, weights_only=True)`` reads it
too. The content is a dict with ``format``, ``version`` and ``state``. Version 1 had no digest.
"""

import hashlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from ddp_slurm.training.snapshot.errors import SnapshotError

FORMAT = "ddp_slurm snapshot"
VERSION = 2
DIGEST_MARK = b"ddp_slurm sha256 "
DIGEST_BYTES = len(DIGEST_MARK) + 64


def write_snapshot(file: BinaryIO, state: dict[str, Any]) -> None:
    """Write ``state``, and the digest. Raises OSError as the file does."""
    hashed = _HashedFile(file)
    try:
        content = {"format": FORMAT, "version": VERSION, "state": state}
        torch.save(content, cast(BinaryIO, hashed))
    except RuntimeError as error:  # torch hides the file's own error
        raise hashed.error or OSError(str(error)) from error
    hashed.end()


class _HashedFile:
    """Passes what is written on to a file, and computes its SHA-256 digest."""

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self._file = file
        self._digest = hashlib.sha256()
        self._last_two = b""  # not in the digest yet: a zip file ends with its comment's length

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise
        if size < 2:
            view = memoryview(self._last_two + bytes(view))
        else:
            self._digest.update(self._last_two)
        self._digest.update(view[:-2])
        self._last_two = bytes(view[-2:])
        return size

    def flush(self) -> None:
        self._file.flush()

    def end(self) -> None:
        """Append the digest as the zip file's comment."""
        length = DIGEST_BYTES.to_bytes(2, "little")
        self._file.seek(-2, os.SEEK_END)
        self._file.write(length)
        self._digest.update(length)
        self._file.write(DIGEST_MARK + self._digest.hexdigest().encode())


def read_snapshot(path: Path, data: bytes) -> dict[str, Any]:
    """The state in the content of a snapshot file, on the CPU.

    Raises SnapshotError, with ``path``, if any bit is damaged or the file is something else.
    """
    has_digest = data[-DIGEST_BYTES:].startswith(DIGEST_MARK)
    if has_digest:
        _check_digest(path, data)
    else:
        _check_archive(path, data)
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a foreign pickle; all mean: not ours
        raise SnapshotError(
            f"{path} is not a snapshot of ddp_slurm ({type(error).__name__})"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SnapshotError(
            f"{path} is not a snapshot of ddp_slurm (a torch file of another program)"
        )
    version = content.get("version")
    if version not in (1, VERSION):
        raise SnapshotError(
            f"{path} has snapshot version {version}, this program reads 1 and {VERSION}; "
            "use the release that wrote it"
        )
    if version == VERSION and not has_digest:
        raise SnapshotError(f"{path} is damaged (its digest is missing)")
    state: dict[str, Any] = content["state"]
    return state


def _check_digest(path: Path, data: bytes) -> None:
    stored = data[-DIGEST_BYTES:].removeprefix(DIGEST_MARK)
    computed = hashlib.sha256(memoryview(data)[:-DIGEST_BYTES]).hexdigest()
    if stored != computed.encode():
        raise SnapshotError(f"{path} is damaged (its SHA-256 digest differs)")


def _check_archive(path: Path, data: bytes) -> None:
    """Every checksum of the zip file: torch.load alone would take flipped bits for weights."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile raises many types for damaged headers
        raise SnapshotError(f"{path} is damaged or no snapshot ({error})") from error
    if damaged:
        raise SnapshotError(f"{path} is damaged (checksum of {damaged!r})")
