"""Snapshots that survive a kill at any moment, and need no shared disk.

The file is what ``torch.save`` writes (readable with ``torch.load(path, weights_only=True)``): a dict with ``format``,
``version`` and ``state``. Only rank 0 touches it; the others get its bytes by broadcast.
"""

import contextlib
import io
import numbers
import os
import zipfile
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_slurm.errors import DdpSlurmError

FORMAT = "ddp_slurm snapshot"
VERSION = 1
CHUNK_BYTES = 256 * 1024**2


class SnapshotError(DdpSlurmError):
    """A snapshot that cannot be written or read."""


class Snapshot:
    """One snapshot file and the previous one beside it (``NAME.previous``).

    Args:
        path: of the file; its folder is made when missing.
        group: a gloo group for the broadcast; None takes the default group, or makes one where that is NCCL's.
            Without a process group this is one process's snapshot.
    """

    def __init__(
        self, path: str | os.PathLike[str], group: dist.ProcessGroup | None = None
    ) -> None:
        self.path = Path(os.path.expanduser(path)).absolute()
        self.previous = self.path.with_name(self.path.name + ".previous")
        self._temporary = self.path.with_name(f".{self.path.name}.writing")
        self._group = group
        self._is_damaged = False
        self.warnings: list[str] = []

    def save(self, state: dict[str, Any]) -> None:
        """Write ``state`` whole or not at all; the snapshot before it becomes the previous one.

        All ranks may call it, rank 0 alone writes. The state may hold tensors, numbers, strings, None, and dicts,
        lists and tuples of them; a subclass of these, such as a NumPy number, is written as the plain one.

        Raises SnapshotError where anything else is in it, or the file cannot be written (a full disk, permissions): the
        snapshots there are as they were.
        """
        if _rank(self._group) != 0:
            return
        plain = _plain(state, "state")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._temporary, "wb") as file:
                torch.save({"format": FORMAT, "version": VERSION, "state": plain}, file)
                file.flush()
                os.fsync(file.fileno())
            if (
                self.path.exists() and not self._is_damaged
            ):  # the previous one is then the only good one
                os.replace(self.path, self.previous)
            os.replace(self._temporary, self.path)
            self._is_damaged = False
            _sync_folder(self.path.parent)
        except (
            OSError,
            RuntimeError,
        ) as error:  # torch's zip writer reports a full disk as RuntimeError
            self._remove_temporary()
            raise SnapshotError(
                f"cannot write the snapshot {self.path}: {error}; the one before it stays"
            ) from error

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
            if (
                self._group is None and dist.get_backend() == "nccl"
            ):  # it cannot send what is not on a GPU
                self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
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
        received = _broadcast_bytes(
            data if kind == 0 else (fault or "").encode(), size, self._group
        )
        if kind == 1:
            raise SnapshotError(received.decode())
        return received

    def _read(self) -> bytes | None:
        self.warnings, faults = [], []
        self._remove_temporary()  # of a run that was killed while it wrote
        for path in (self.path, self.previous):
            try:
                data = path.read_bytes()
                _check_whole(path, data)
            except FileNotFoundError:
                continue
            except (SnapshotError, OSError) as error:
                faults.append(str(error))
            else:
                self._is_damaged = bool(faults)
                self.warnings = [f"{fault}; taking {path} instead" for fault in faults]
                return data
        if faults:
            raise SnapshotError(
                "; ".join(faults)
                + ". No snapshot to resume from: move the file away, or name another path"
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
        raise SnapshotError(
            f"{path} is no snapshot of ddp_slurm ({type(error).__name__})"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SnapshotError(f"{path} is no snapshot of ddp_slurm (a torch file of another program)")
    if content.get("version") != VERSION:
        raise SnapshotError(
            f"{path} has snapshot version {content.get('version')}, this program reads {VERSION}; use the release that "
            "wrote it"
        )


def _plain(value: Any, where: str) -> Any:
    """The value in the types that ``weights_only=True`` reads back: not NumPy's numbers, enums or named tuples."""
    if isinstance(value, dict):
        return {
            _plain(key, f"key of {where}"): _plain(item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, Tensor | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)  # an enum's own __str__ would give its name
    if isinstance(value, bytes):
        return bytes(value)
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
