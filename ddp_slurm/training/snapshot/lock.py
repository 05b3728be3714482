"""One run a snapshot: a lock that the run holds as long as its process lives.

A host that crashes may leave its lock behind on a network file system: with NFS 3 until it has
rebooted. So the same Slurm job, requeued, takes the lock over by writing its own entry into the
file. The process before it, if it is still alive after all, finds that entry and saves nothing.
"""

import contextlib
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
    """Lock the snapshot ``path`` for this process; None, or a warning if that is not certain.

    Raises SnapshotError, with job and host of the holder, if another run has the lock, and OSError
    if the lock file ``.NAME.lock`` cannot be made.
    """
    lock_file = _lock_file(path)
    key = (os.getpid(), lock_file)
    if key in _held:
        return None
    descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    warning = None
    try:
        if not _wait_for_lock(descriptor):
            warning = _take_over(descriptor, path)
    except OSError as error:  # no lock manager on this file system
        os.close(descriptor)
        return f"{path} is not locked against other runs: {error}"
    except SnapshotError:
        os.close(descriptor)
        raise
    since = datetime.now().isoformat(timespec="seconds")
    process = f"host {socket.gethostname()}, process {os.getpid()}, since {since}"
    entry = f"{_own_job()}, {process}".encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, entry, 0)
    _held[key] = (descriptor, entry)
    return warning


def check_still_locked(path: Path) -> None:
    """Raise SnapshotError if another run has written its entry into the lock file.

    That is the same job after a requeue, a run on a file system without locks between hosts, or
    one whose user has removed our lock file.
    """
    lock_file = _lock_file(path)
    held = _held.get((os.getpid(), lock_file))
    if held is None:
        return
    descriptor, entry = held
    try:
        is_ours = os.path.samestat(os.stat(lock_file), os.fstat(descriptor))
    except FileNotFoundError:  # removed, and no other run has made it again
        is_ours = True
    found = os.pread(descriptor, 4096, 0) if is_ours else lock_file.read_bytes()
    if found != entry:
        raise SnapshotError(
            f"another run has taken over the snapshot {path}: {found.decode(errors='replace')}"
        )


def _wait_for_lock(descriptor: int) -> bool:
    """Whether the lock was free, or became free in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)


def _take_over(descriptor: int, path: Path) -> str:
    """A warning if the holder is this Slurm job before a requeue. Raises SnapshotError if not."""
    holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
    is_same_job = os.environ.get("SLURM_JOB_ID") and holder.startswith(f"{_own_job()}, ")
    if is_same_job:
        return f"{path} is taken over from this job's earlier process: {holder}"
    raise SnapshotError(
        f"the snapshot {path} is in use by another run: {holder}. Give each run its own path; to "
        "only read it use Snapshot(path, lock=False). If that run has ended (its host may have "
        f"crashed), remove {_lock_file(path)}"
    )


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _own_job() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    return f"job {job}" if job else "no Slurm job"
