"""One run a snapshot: a lock that the run holds as long as its process lives."""

import fcntl
import os
import socket
import time
from datetime import datetime
from pathlib import Path

from ddp_slurm.training.snapshot.errors import SnapshotError

PATIENCE_SECONDS = 10.0
"""The longest wait for another run that is just ending, such as the one before a requeue."""
POLL_SECONDS = 0.2

_held: dict[tuple[int, Path], tuple[int, bytes]] = {}
"""By process and lock file: its descriptor and our entry in it. The descriptor stays open until the
process ends: closing any descriptor of a file gives up the process's POSIX locks on it."""


def lock_run(path: Path) -> str | None:
    """Lock the snapshot ``path`` for this process; None, or a warning where locks do not work.

    Raises SnapshotError, with job and host of the holder, if another run has the lock, and OSError
    if the lock file ``.NAME.lock`` cannot be made.
    """
    lock_file = _lock_file(path)
    key = (os.getpid(), lock_file)
    if key in _held:
        return None
    descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _wait_for_lock(descriptor, path)
    except OSError as error:  # no lock manager on this file system
        os.close(descriptor)
        return f"{path} is not locked against other runs: {error}"
    except SnapshotError:
        os.close(descriptor)
        raise
    entry = _own_entry().encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, entry, 0)
    _held[key] = (descriptor, entry)
    return None


def check_still_locked(path: Path) -> None:
    """Raise SnapshotError if another run has taken the lock over, on a file system without locks
    between hosts."""
    held = _held.get((os.getpid(), _lock_file(path)))
    if held is None:
        return
    descriptor, entry = held
    found = os.pread(descriptor, 4096, 0)
    if found != entry:
        raise SnapshotError(
            f"another run has taken over the snapshot {path}: {found.decode(errors='replace')}"
        )


def _wait_for_lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            pass
        else:
            return
        if time.monotonic() > deadline:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
            raise SnapshotError(
                f"the snapshot {path} is in use by another run: {holder}. Give each run its own "
                "path; to only read it use Snapshot(path, lock=False)"
            )
        time.sleep(POLL_SECONDS)


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _own_entry() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    name = f"job {job}" if job else "no Slurm job"
    since = datetime.now().isoformat(timespec="seconds")
    return f"{name}, host {socket.gethostname()}, process {os.getpid()}, since {since}"
