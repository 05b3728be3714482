"""The Trainer saves and stops when its job is preempted, and ends at any other SIGTERM."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.processes import is_alive
from tests.waiting import wait_until

from .trainer_worker import Run, train
from .worlds import World, world

SQUEUE = "#!/bin/sh\necho 'RUNNING   {preempted}   '\n"
SCANCEL = "#!/bin/sh\n[ \"$*\" = '--signal=USR2 48' ] && exec kill -USR2 $(cat {pids})\n"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of the ranks of a Slurm step with restarts left; Slurm's clients are stubs."""
    tools = tmp_path / "tools"
    tools.mkdir()
    texts = {"squeue": SQUEUE.format(preempted="N/A"), "scancel": SCANCEL}
    for name, text in texts.items():
        (tools / name).write_text(text.format(pids=tmp_path / "pids"))
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "DDP_SLURM_REQUEUE_MARKER": str(tmp_path / "requeue"),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "48",
    }


def run_of(tmp_path: Path) -> Run:
    return Run((3, 5), tmp_path / "s.pt", epochs=100_000, save_every_steps=None)


def send_term(running: World, tmp_path: Path, ranks: tuple[int, ...] = (0, 1)) -> None:
    """To all ranks, as Slurm does, or some, after they have begun."""
    for rank in range(2):
        running.receive(rank)
    pids = [str(process.pid) for process in running.processes]
    (tmp_path / "pids").write_text(" ".join(pids))
    for rank in ranks:
        running.signal(rank, signal.SIGTERM)


@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_preempted_training_saves_and_stops(
    tmp_path: Path, environ: dict[str, str], ranks: tuple[int, ...]
) -> None:
    (tmp_path / "tools" / "squeue").write_text(SQUEUE.format(preempted="2026-11-28T15:04:09"))
    with world(tmp_path / "run", (1, 1), train, run_of(tmp_path), environ=environ) as running:
        send_term(running, tmp_path, ranks)
        reports = [running.receive(rank) for rank in range(2)]
        assert running.wait() == [0, 0], running.all_logs()
    assert [report.finished for report in reports] == [False, False]
    assert (tmp_path / "s.pt").exists()
    assert (tmp_path / "requeue").exists()


def children(pid: int | None) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if stat.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(stat.parent.name))
    return found


def test_loader_workers_last_until_the_ranks_have_saved(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """Slurm sends SIGTERM to them as well."""
    (tmp_path / "tools" / "squeue").write_text(SQUEUE.format(preempted="2026-11-28T15:04:09"))
    run = replace(run_of(tmp_path), samples=8000, noisy=True, workers=2)
    with world(tmp_path / "run", (1, 1), train, run, environ=environ) as running:
        send_term(running, tmp_path, ranks=())
        workers = [pid for process in running.processes for pid in children(process.pid)]
        assert len(workers) == 4
        for pid in [*workers, *(process.pid for process in running.processes)]:
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
        assert [running.receive(rank).finished for rank in range(2)] == [False, False]
        assert running.wait() == [0, 0], running.all_logs()
    assert (tmp_path / "s.pt").exists()


def test_loader_workers_end_with_a_killed_rank(tmp_path: Path) -> None:
    run = replace(run_of(tmp_path), samples=8000, noisy=True, workers=2)
    with world(tmp_path / "run", (1, 1), train, run) as running:
        for rank in range(2):
            running.receive(rank)
        workers = children(running.processes[1].pid)
        running.signal(1, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, workers)), seconds=4)  # torch itself needs 5 s


@pytest.mark.parametrize("has_marker", [True, False])
def test_cancelled_training_ends_at_once(
    tmp_path: Path, environ: dict[str, str], has_marker: bool
) -> None:
    (tmp_path / "tools" / "squeue").write_text("#!/bin/sh\necho 'COMPLETING   N/A   '\n")
    if not has_marker:  # a job without restarts would read COMPLETED after it has stopped
        del environ["DDP_SLURM_REQUEUE_MARKER"]
    with world(tmp_path / "run", (1, 1), train, run_of(tmp_path), environ=environ) as running:
        send_term(running, tmp_path)
        statuses = running.wait(10)
        assert statuses == ([143, 143] if has_marker else [-15, -15]), running.all_logs()
        logs = running.all_logs()
    assert "ends, because" not in logs
    assert "failed" not in logs
    assert not (tmp_path / "s.pt").exists()


STARTS_A_LOADER = """
import os, signal, torch
from torch.utils.data import TensorDataset
from ddp_slurm.training.data import DatasetSource
from ddp_slurm.training.process_group.stop_signal import catch_stop_signal, stop_when_preempted

catch_stop_signal()
stop_when_preempted(1, 1)
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
data = TensorDataset(torch.arange(8.0), torch.arange(8))
source = DatasetSource(data, torch.device("cpu"), workers=2)
for inputs, _ in source.batches(torch.arange(8), [(0, 4), (4, 8)], epoch=0):
    print(inputs.sum().item())
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_loader_worker_outlives_a_sigterm_before_it_is_ready(environ: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS_A_LOADER],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "6.0\n22.0\nset()\n", done.stderr


FORKS = """
import os, signal
from ddp_slurm.training.process_group.stop_signal import catch_stop_signal, stop_when_preempted

catch_stop_signal()
stop_when_preempted(1, 1)
ready, write = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(10)
    os.write(write, b".")
    while True:
        signal.pause()
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1])
"""


def test_forked_process_ends_by_sigterm(environ: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], env={**os.environ, **environ}, capture_output=True, text=True
    )
    assert done.stdout == f"{int(signal.SIGTERM)}\n", done.stderr
