"""One run a snapshot, and what is checked before a training: locks, links, space."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_slurm.training import Snapshot, SnapshotError
from ddp_slurm.training.snapshot import lock as snapshot_lock

from .snapshots import names, state, step

HOLD = """
import sys
from ddp_slurm.training import Snapshot, SnapshotError
snapshot = Snapshot(sys.argv[1])
snapshot.load()
print("held", flush=True)
sys.stdin.readline()
try:
    snapshot.save({"step": 9})
except SnapshotError as error:
    print(error, flush=True)
"""


@contextlib.contextmanager
def another_run(path: Path, job: str = "4711") -> Iterator[subprocess.Popen[str]]:
    """A process of a job that uses the snapshot; of none if ``job`` is empty."""
    command = [sys.executable, "-c", HOLD, str(path)]
    environ = {**os.environ, "SLURM_JOB_ID": job}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environ, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_snapshot_in_use_by_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_lock, "PATIENCE_SECONDS", 0.3)
    path = tmp_path / "new folder" / "s.pt"
    with another_run(path) as process:
        words = (
            rf"the snapshot {path} is in use by another run: job 4711, host "
            rf"{socket.gethostname()}, process {process.pid}, since 20"
        )
        with pytest.raises(SnapshotError, match=words):
            Snapshot(path).load()
        with pytest.raises(SnapshotError, match=words):
            Snapshot(path).save(state(1))
        assert Snapshot(path, lock=False).load() is None
        assert names(path.parent) == [".s.pt.lock"]
    Snapshot(path).save(state(1))  # the other one was killed: its lock is gone


def test_snapshot_of_a_requeued_job_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crashed host's lock may stay; a process of it that lives after all must not save."""
    monkeypatch.setattr(snapshot_lock, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with another_run(tmp_path / "s.pt") as process:
        snapshot = Snapshot(tmp_path / "s.pt")
        assert snapshot.load() is None
        assert "is taken over from this job's earlier process: job 4711" in snapshot.warnings[0]
        snapshot.save(state(1))
        printed, _ = process.communicate("save\n")
    assert "another run has taken over the snapshot" in printed
    assert f"process {os.getpid()}" in printed
    assert step(snapshot) == 1


def test_snapshot_of_a_run_without_slurm_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs without a job are not the same job."""
    monkeypatch.setattr(snapshot_lock, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setenv("SLURM_JOB_ID", "")
    refused = pytest.raises(SnapshotError, match="in use by another run: no Slurm job, host")
    with another_run(tmp_path / "s.pt", job=""), refused:
        Snapshot(tmp_path / "s.pt").load()


def test_snapshot_waits_for_a_run_that_is_ending(tmp_path: Path) -> None:
    path = tmp_path / "s.pt"
    with another_run(path) as process:
        threading.Timer(0.5, process.kill).start()
        Snapshot(path).save(state(1))


@pytest.mark.parametrize("removed", [False, True])
def test_snapshot_taken_over_without_locks_is_noticed(snapshot: Snapshot, removed: bool) -> None:
    """Some network file systems lock within one host only; or the lock file was removed."""
    lock = snapshot.path.with_name(".snap shot.pt.lock")
    if removed:
        lock.unlink()
        snapshot.save(state(2))
    lock.write_text("job 9, host other, process 1, since 2026")
    with pytest.raises(
        SnapshotError, match=r"(?s)another run has taken over .*: job 9, host other"
    ):
        snapshot.save(state(3))
    assert step(snapshot) == 2
    assert len(names(snapshot.path.parent)) == 3


def test_snapshot_without_a_lock_manager_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(snapshot_lock.fcntl, "lockf", no_locks)
    snapshot = Snapshot(tmp_path / "s.pt")
    assert snapshot.load() is None
    assert "s.pt is not locked against other runs: [Errno 37] No locks" in snapshot.warnings[0]
    snapshot.save(state(1))
    assert step(snapshot) == 1


def test_snapshot_keeps_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "latest.pt"
    link.symlink_to("disk/real.pt")
    snapshot = Snapshot(link)
    for number in (1, 2):
        snapshot.save(state(number))
    assert link.is_symlink()
    assert names(tmp_path / "disk") == [".real.pt.lock", "real.pt", "real.pt.previous"]
    assert step(Snapshot(link)) == 2


def test_snapshot_left_over_files_are_removed(tmp_path: Path) -> None:
    for name in (".s.pt.0badcafe.writing", ".other.pt.0badcafe.writing"):
        (tmp_path / name).touch()
    Snapshot(tmp_path / "s.pt").load()
    assert names(tmp_path) == [".other.pt.0badcafe.writing", ".s.pt.lock"]


def test_snapshot_probe_finds_what_cannot_be_saved(snapshot: Snapshot) -> None:
    before = names(snapshot.path.parent)
    snapshot.probe(state(3))
    with pytest.raises(SnapshotError, match=r"a snapshot cannot hold state\['bad'\]: set"):
        snapshot.probe({"bad": {1}})
    assert names(snapshot.path.parent) == before


def test_snapshot_probe_names_the_space_needed(small_disk: Path) -> None:
    snapshot = Snapshot(small_disk / "s.pt")
    snapshot.probe(state(1, size=4000))  # three times 16,000 of 65,536 bytes
    with pytest.raises(SnapshotError, match=r"\(ENOSPC\); each snapshot needs 24,000 bytes"):
        snapshot.probe(state(1, size=6000))
    snapshot.save(state(1, size=6000))
    snapshot.save(state(1, size=6000))
    assert names(small_disk) == [".s.pt.lock", "s.pt", "s.pt.previous"]
