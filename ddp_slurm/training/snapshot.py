"""Snapshots that survive a kill at any moment, and need no shared disk.

The file is what ``torch.save`` writes (readable with ``torch.load(path, weights_only=True)``): a dict with ``format``,
``version`` and ``state``. Only rank 0 touches it; the others get its bytes by broadcast.
"""

import contextlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DdpSlurmError

FORMAT = "ddp_slurm snapshot"
VERSION = 1
CHUNK_BYTES = 256 * 1024**2


class SnapshotError(DdpSlurmError):
    """A snapshot that cannot be written or read."""


class Snapshot:
    """One snapshot file and the previous one beside it (``NAME.previous``).

    Args:
        path: of the file; its folder is made when missing.
        group: a gloo group for the broadcast, None for the default group. Without a process group this is one
            process's snapshot.
    """

    def __init__(self, path: str | os.PathLike[str], group: dist.ProcessGroup | None = None) -> None:
        self.path = Path(path).expanduser().absolute()
        self.previous = self.path.with_name(self.path.name + ".previous")
        self._temporary = self.path.with_name(f".{self.path.name}.writing")
        self._group = group
        self.warnings: list[str] = []

    def save(self, state: dict[str, Any]) -> None:
        """Write ``state`` whole or not at all; the snapshot before it becomes the previous one.

        All ranks may call it, rank 0 alone writes. The state may hold tensors, numbers, strings, None, and dicts,
        lists and tuples of them.

        Raises SnapshotError where anything else is in it, or the file cannot be written (a full disk, permissions): the
        snapshots there are as they were.
        """
        if _rank(self._group) != 0:
            return
        _check_plain(state, "state")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._temporary, "wb") as file:
                torch.save({"format": FORMAT, "version": VERSION, "state": state}, file)
                file.flush()
                os.fsync(file.fileno())
            if self.path.exists():
                os.replace(self.path, self.previous)
            os.replace(self._temporary, self.path)
            _sync_folder(self.path.parent)
        except (OSError, RuntimeError) as error:  # torch's zip writer reports a full disk as RuntimeError
            self._remove_temporary()
            raise SnapshotError(f"cannot write the snapshot {self.path}: {error}; the one before it stays") from error

    def load(self) -> dict[str, Any] | None:
        """The newest state that is whole, on the CPU, the same on every rank; None where there is no snapshot.

        Rank 0 reads, the others receive. A damaged or foreign file goes into ``warnings`` (of rank 0), and the
        previous one is used.

        Raises SnapshotError, on every rank, where there are files and none of them can be used: a run never begins
        anew, and overwrites them, because of a damaged one.
        """
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            data = self._read()
        else:
            data = self._read_and_broadcast()
        if data is None:
            return None
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)["state"]
        assert isinstance(state, dict)
        return state

    def _read_and_broadcast(self) -> bytes | None:
        data, fault = None, None
        if _rank(self._group) == 0:
            try:
                data = self._read()
            except SnapshotError as error:
                fault = str(error)
        size = len(data) if data is not None else len(fault.encode()) if fault is not None else 0
        kind = 0 if data is not None else 1 if fault is not None else 2
        header = torch.tensor([kind, size], dtype=torch.int64)
        dist.broadcast(header, src=0, group=self._group)
        kind, size = int(header[0]), int(header[1])
        if kind == 2:
            return None
        received = _broadcast_bytes(data if kind == 0 else (fault or "").encode(), size, self._group)
        if kind == 1:
            raise SnapshotError(received.decode())
        return received

    def _read(self) -> bytes | None:
        self.warnings, faults = [], []
        self._remove_temporary()  # of a run that was killed while it wrote
        for path in (self.path, self.previous):
            if not path.exists():
                continue
            try:
                data = path.read_bytes()
                _check_whole(path, data)
            except (SnapshotError, OSError) as error:
                faults.append(str(error))
            else:
                self.warnings = [f"{fault}; taking {path} instead" for fault in faults]
                return data
        if faults:
            raise SnapshotError(
                "; ".join(faults) + ". No snapshot to resume from: move the file away, or name another path"
            )
        return None

    def _remove_temporary(self) -> None:
        with contextlib.suppress(OSError):  # not there, or a place where nothing can be changed
            self._temporary.unlink()


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _sync_folder(folder: Path) -> None:
    """The new name survives a power cut only when its folder is on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_whole(path: Path, data: bytes) -> None:
    """Every checksum of the zip file, then the format; torch.load alone would take flipped bits for weights."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, OverflowError) as error:
        raise SnapshotError(f"{path} is damaged or no snapshot ({error})") from error
    if damaged:
        raise SnapshotError(f"{path} is damaged (checksum of {damaged})")
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a foreign pickle; each means: not ours
        raise SnapshotError(f"{path} is no snapshot of ddp_slurm ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SnapshotError(f"{path} is no snapshot of ddp_slurm (a torch file of another program)")
    if content.get("version") != VERSION:
        raise SnapshotError(
            f"{path} has snapshot version {content.get('version')}, this program reads {VERSION}; use the release that "
            "wrote it"
        )


def _check_plain(value: object, where: str) -> None:
    """What ``weights_only=True`` will not read back must not be written."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, f"key of {where}")
            _check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_plain(item, f"{where}[{i}]")
    elif not (value is None or isinstance(value, Tensor | bool | int | float | str | bytes)):
        raise SnapshotError(
            f"a snapshot cannot hold {where}: {type(value).__name__}; tensors, numbers, strings, dicts, lists and "
            "tuples can"
        )


def _broadcast_bytes(data: bytes | None, size: int, group: dist.ProcessGroup | None) -> bytes:
    buffer = torch.empty(size, dtype=torch.uint8)
    if data is not None and _rank(group) == 0:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for start in range(0, size, CHUNK_BYTES):
        dist.broadcast(buffer[start : start + CHUNK_BYTES], src=0, group=group)
    return buffer.numpy().tobytes()
