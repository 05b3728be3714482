"""A snapshot file and the previous one beside it. Only rank 0 touches them."""

import contextlib
import errno
import io
import os
import secrets
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ddp_slurm.training.exchange import broadcast_value
from ddp_slurm.training.snapshot.errors import SnapshotError
from ddp_slurm.training.snapshot.file import read_snapshot, write_snapshot
from ddp_slurm.training.snapshot.lock import check_still_locked, lock_run
from ddp_slurm.training.snapshot.plain import plain, tensor_bytes

CHUNK_BYTES = 256 * 1024**2


class Snapshot:
    """One snapshot file and the previous one beside it (``NAME.previous``).

    Args:
        path: of the file; its folder is made if it does not exist. A symbolic link stays, and its
            target is written.
        group: a gloo group for the broadcast; None takes the default group, or makes one where that
            is NCCL's. Without a process group this is one process's snapshot.
        lock: refuse to load or save while another run does. False is for reading only.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        group: dist.ProcessGroup | None = None,
        *,
        lock: bool = True,
    ) -> None:
        self.path = Path(os.path.realpath(os.path.expanduser(path)))
        self.previous = self.path.with_name(self.path.name + ".previous")
        self.warnings: list[str] = []
        self._group = group
        self._lock = lock
        self._is_damaged = False

    def save(self, state: dict[str, Any]) -> None:
        """Write ``state`` whole or not at all; the snapshot before it becomes the previous one.

        All ranks may call it, rank 0 alone writes. The state may hold tensors, numbers, strings,
        None, and dicts, lists and tuples of them; a subclass of these, such as a NumPy number, is
        written as the plain type.

        Raises SnapshotError if it holds anything else, if another run uses the file, or if it
        cannot be written (a full disk, permissions): the existing snapshots stay as they are.
        """
        if _rank(self._group) != 0:
            return
        values = plain(state, "state")
        temporary = self._temporary()
        try:
            self._make_folder_and_lock()
            with open(temporary, "wb") as file:
                write_snapshot(file, values)
                file.flush()
                os.fsync(file.fileno())
            check_still_locked(self.path)
            # A damaged file must not replace the previous one, which is then the only good one.
            if self.path.exists() and not self._is_damaged:
                os.replace(self.path, self.previous)
            os.replace(temporary, self.path)
            self._is_damaged = False
            _sync_folder(self.path.parent)
        except OSError as error:
            reason = self._reason(error, tensor_bytes(values))
            raise SnapshotError(
                f"cannot write the snapshot {self.path}: {reason}; the one before it stays"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # usually it has its final name
                temporary.unlink()

    def probe(self, state: dict[str, Any]) -> None:
        """Check before a training that ``state`` can be saved: its types, the folder, the space.

        All ranks may call it, rank 0 alone checks. The space is that of three files of the size of
        the tensors in ``state``, less the existing ones: a new file is written before an old one is
        removed. Raises SnapshotError as ``save`` would.
        """
        if _rank(self._group) != 0:
            return
        needed = tensor_bytes(plain(state, "state"))
        temporary = self._temporary()
        try:
            self._make_folder_and_lock()
            temporary.write_bytes(b"probe")
            temporary.unlink()
            missing = 3 - self.path.exists() - self.previous.exists()
            if self._free_bytes() < missing * needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            reason = self._reason(error, needed)
            raise SnapshotError(f"cannot write the snapshot {self.path}: {reason}") from error

    def load(self) -> dict[str, Any] | None:
        """The newest state that is whole, on the CPU, the same on every rank; None without files.

        Rank 0 reads, the others receive. A damaged or foreign file is reported in ``warnings`` (of
        rank 0), and the previous one is used.

        Raises SnapshotError, on every rank, if there are files and none of them can be used: a
        run never starts from scratch, and overwrites them, because of a damaged one. Also if
        another run uses the file.
        """
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            found = self._read()
            return None if found is None else found[1]
        if self._group is None and dist.get_backend() == "nccl":  # it sends GPU memory only
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        group = self._group or dist.group.WORLD
        assert group is not None
        found, message = None, None
        if _rank(group) == 0:
            try:
                found = self._read()
            except SnapshotError as error:
                message = str(error)
        size, message = broadcast_value((found and len(found[0]), message), group)
        if message is not None:
            raise SnapshotError(message)
        if size is None:
            return None
        if found is None:
            content = torch.empty(size, dtype=torch.uint8)
        else:
            content = torch.frombuffer(bytearray(found[0]), dtype=torch.uint8)
        for chunk in torch.split(content, CHUNK_BYTES):
            dist.broadcast(chunk, src=0, group=group)
        if found is not None:
            return found[1]
        file = io.BytesIO(content.numpy().tobytes())
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)["state"]
        return state

    def _read(self) -> tuple[bytes, dict[str, Any]] | None:
        """The bytes of the newest whole file, and its state."""
        self.warnings = []
        if self._lock:
            # A folder that cannot be made or written can still be read.
            with contextlib.suppress(OSError):
                self._make_folder_and_lock()
                self._remove_left_over()
        errors = []
        for path in (self.path, self.previous):
            try:
                data = path.read_bytes()
                state = read_snapshot(path, data)
            except FileNotFoundError:
                continue
            except (SnapshotError, OSError) as error:
                errors.append(str(error))
            else:
                self._is_damaged = bool(errors)
                self.warnings += [f"{error}; using {path} instead" for error in errors]
                return data, state
        if errors:
            raise SnapshotError(
                "; ".join(errors)
                + ". No snapshot to resume from: move the file away, or give another path"
            )
        return None

    def _make_folder_and_lock(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        warning = lock_run(self.path) if self._lock else None
        if warning and warning not in self.warnings:
            self.warnings.append(warning)

    def _temporary(self) -> Path:
        """A name that no other process has: two runs must not write one file."""
        return self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.writing")

    def _remove_left_over(self) -> None:
        """Remove files of runs that were killed while they wrote. For the lock's holder only."""
        for entry in os.scandir(self.path.parent):
            is_ours = entry.name.startswith(f".{self.path.name}.")
            if is_ours and entry.name.endswith(".writing"):
                os.unlink(entry.path)

    def _free_bytes(self) -> int:
        numbers = os.statvfs(self.path.parent)
        return numbers.f_bavail * numbers.f_frsize

    def _reason(self, error: OSError, needed: int) -> str:
        """The error's text; for a full disk with the bytes that are needed and free."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return str(error)
        name = errno.errorcode[error.errno]
        free = self._free_bytes()
        return (
            f"{error} ({name}); each snapshot needs {needed:,} bytes, up to three files exist at "
            f"once, and {free:,} bytes are free in {self.path.parent}"
        )


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _sync_folder(folder: Path) -> None:
    """The new name survives a power cut only if its folder is on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
