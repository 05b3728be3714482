"""A rank that fails, is killed, hangs or leaves early ends all others in bounded time, and the log
names it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from ddp_slurm.training.process_group.failure import is_failed_collective
from tests.conftest import without_launcher

from .joining import (
    be_late,
    end_outside_a_collective,
    end_silently,
    end_while_rank_0_waits,
    fail_after_rank_0_has_left,
    fail_at_three,
    fail_inside_nccl,
    fail_without_collective,
    leave_early,
    stop_before,
)
from .worlds import PATIENCE_SECONDS, World, rank_environments, run_world, world


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("raise", 1, "rank 3 on node failed: ValueError: a bad sample"),
        ("user's error", 2, "rank 3 on node failed: precision fp7 is none"),
        ("exit", 5, None),
        ("exit True", 1, None),
        ("kill", -signal.SIGKILL, None),
    ],
)
def test_failing_rank_ends_all(tmp_path: Path, how: str, status: int, words: str | None) -> None:
    with world(
        tmp_path, (1, 2, 4), fail_at_three, how, environ={"SLURMD_NODENAME": "node"}
    ) as running:
        statuses = running.wait(PATIENCE_SECONDS)
        logs = [running.log(rank) for rank in range(7)]
    assert statuses[3] == status
    assert all(
        other in ({status} if how != "kill" else {1})
        for rank, other in enumerate(statuses)
        if rank != 3
    )
    if words is not None:
        assert words in logs[3]
        assert ("Traceback" in logs[3]) == (how == "raise")
    if how == "raise":
        for rank in (0, 1, 2, 4, 5, 6):
            assert (
                f"rank {rank} on node: ends, because rank 3 on node failed: ValueError: a bad "
                "sample" in logs[rank]
            )
            assert "Traceback" not in logs[rank]


def test_rank_0_ends_with_the_failure_of_a_late_rank(tmp_path: Path) -> None:
    with world(
        tmp_path, (2,), fail_after_rank_0_has_left, environ={"SLURMD_NODENAME": "node"}
    ) as running:
        assert running.wait(PATIENCE_SECONDS) == [1, 1]
        assert (
            "rank 0 on node: ends, because rank 1 on node failed: ValueError: the last"
            in running.log(0)
        )


def test_rank_0_waits_for_a_late_rank_for_bounded_time(tmp_path: Path) -> None:
    assert run_world(tmp_path / "waits", (2,), be_late, 60.0) == [None, None]
    with world(tmp_path / "leaves", (2,), be_late, 1.0) as running:
        assert running.wait(PATIENCE_SECONDS) == [0, 1]


def test_failure_reaches_a_rank_outside_a_collective(tmp_path: Path) -> None:
    with world(
        tmp_path, (2,), fail_without_collective, environ={"SLURMD_NODENAME": "node"}
    ) as running:
        assert running.wait(PATIENCE_SECONDS) == [1, 1]
        assert (
            "rank 0 on node: ends, because rank 1 on node failed: ValueError: a bad sample"
            in running.log(0)
        )


NODE = {"SLURMD_NODENAME": "node"}
SILENT = "ended without a report"


def statuses_but(running: World, victim: int) -> set[int | None]:
    """The exit statuses of all ranks but one; none may still run."""
    statuses = {rank: running.processes[rank] for rank in range(len(running.processes))}
    del statuses[victim]
    for process in statuses.values():
        process.join(PATIENCE_SECONDS)
    return {process.exitcode for process in statuses.values()}


@pytest.mark.parametrize("victim", [0, 3, 6])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "exit 7", "exit 0"])
def test_rank_that_ends_silently_is_named(tmp_path: Path, how: str, victim: int) -> None:
    with world(tmp_path, (1, 2, 4), end_silently, victim, how, environ=NODE) as running:
        assert statuses_but(running, victim) == {1}
        for rank in {*range(7)} - {victim}:
            log = running.log(rank)
            assert f"rank {rank} on node: ends, because rank {victim} on node" in log
            assert SILENT in log
            assert f"rank {rank} on node failed" not in log
            assert "Traceback" not in log


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_hangs_is_named(tmp_path: Path, victim: int) -> None:
    with world(tmp_path, (1, 2), end_silently, victim, "SIGSTOP", 3.0, environ=NODE) as running:
        assert statuses_but(running, victim) == {1}
        for rank in {*range(3)} - {victim}:
            lines = running.log(rank).splitlines()
            assert "a collective failed: RuntimeError" in lines[0] or rank == 0
            assert f"rank {rank} on node: ends, because rank {victim} on node" in lines[-1]
            assert "does not respond" in lines[-1]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_rank_is_missed_outside_a_collective(tmp_path: Path, how: str, victim: int) -> None:
    with world(tmp_path, (1, 2), end_outside_a_collective, victim, how, environ=NODE) as running:
        assert statuses_but(running, victim) == {1}
        for rank in {*range(3)} - {victim}:
            expected = f"rank {rank} on node: ends, because rank {victim} on node"
            assert expected in running.log(rank).splitlines()[-1]


def test_error_of_an_nccl_group_ends_all(tmp_path: Path) -> None:
    """Tried with NCCL by hand: no test has two GPUs."""
    with world(tmp_path, (1, 1), fail_inside_nccl, environ=NODE) as running:
        assert running.wait(PATIENCE_SECONDS) == [1, 1]
        failed = "rank 1 on node failed: NCCL reports TIMEOUT for a collective"
        assert failed in running.log(1)
        assert f"rank 0 on node: ends, because {failed}" in running.log(0)


@pytest.mark.parametrize("moment", ["verdict", "leaving"])
def test_rank_0_that_hangs_holds_nobody(tmp_path: Path, moment: str) -> None:
    with world(tmp_path, (1, 2), stop_before, moment, environ=NODE) as running:
        assert statuses_but(running, 0) <= {1, 2}
        for rank in (1, 2):
            log = running.log(rank)
            assert f"rank {rank} on node: " in log
            assert "rank 0 " in log
            assert "does not respond" in log


def test_rank_0_that_hangs_from_the_start_holds_nobody(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = {"MASTER_PORT": str(silent.getsockname()[1])}

        def without_rank_0(rank: int, variables: dict[str, str]) -> dict[str, str]:
            return {**variables, **port, "RANK": "1", "WORLD_SIZE": "2"}

        with world(tmp_path, (1,), stop_before, "never", 1.0, change=without_rank_0) as running:
            assert running.wait(PATIENCE_SECONDS) == [2]
            assert f"rank 0 at 127.0.0.1:{port['MASTER_PORT']}" in running.log(0)


def test_exit_status_of_any_rank_is_that_of_all(tmp_path: Path) -> None:
    for number in range(10):
        with world(tmp_path / str(number), (1, 2, 4), fail_at_three, "exit") as running:
            assert running.wait(PATIENCE_SECONDS) == [5] * 7, running.all_logs()


@pytest.mark.parametrize("leaver", [0, 1])
def test_rank_that_leaves_before_a_collective_is_named(tmp_path: Path, leaver: int) -> None:
    with world(tmp_path, (1, 2), leave_early, leaver, "collective", environ=NODE) as running:
        assert statuses_but(running, leaver) == {1}
        logs = running.all_logs()
    assert f"ends, because rank {leaver} on node had left the training normally, while" in logs


def test_rank_0_names_the_ranks_that_it_waits_for(tmp_path: Path) -> None:
    with world(tmp_path, (1, 2), leave_early, 0, "alone", environ=NODE) as running:
        assert running.results() == [None] * 3
        expected = "rank 0 on node has finished and waits for rank 1 on node, rank 2 on node, 9 s"
        assert expected in running.log(0)


def test_rank_0_names_the_ranks_that_left_early(tmp_path: Path) -> None:
    with world(tmp_path, (1, 2), leave_early, 2, "alone", environ=NODE) as running:
        assert running.results() == [None] * 3
        log = running.log(0)
    assert "note: rank 2 on node left the training 1 s ago or earlier, rank 0 on node" in log


@pytest.mark.parametrize("how", ["SIGKILL", "exit 0"])
def test_rank_that_ends_while_rank_0_waits_is_named(tmp_path: Path, how: str) -> None:
    with world(tmp_path, (1, 1), end_while_rank_0_waits, how, environ=NODE) as running:
        assert running.wait(PATIENCE_SECONDS)[0] == 1
        assert "rank 1 on node ended without a report or does not respond" in running.log(0)


SCRIPT = """
import sys, time
import torch.distributed as dist
from ddp_slurm.training import init_distributed

world = init_distributed()
dist.barrier()
if sys.argv[1] == "exit":
    with world:
        if world.rank == 1:
            sys.exit(3)
        dist.barrier()
elif sys.argv[1] == "catch":
    try:
        with world:
            raise ValueError
    except ValueError:
        time.sleep(world.rank / 2)
print("end of the script", flush=True)
"""


def run_script(folder: Path, how: str) -> list["subprocess.CompletedProcess[str]"]:
    """Three ranks of SCRIPT, each with an interpreter of its own that ends as usual."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    processes = []
    for variables in rank_environments((1, 2)):
        environ = {**without_launcher(os.environ), **variables, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), how]
        processes.append(
            subprocess.Popen(command, env=environ, stdout=PIPE, stderr=PIPE, text=True)
        )
    done = []
    for process in processes:
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
        done.append(subprocess.CompletedProcess(command, process.returncode, output, errors))
    return done


def test_sys_exit_of_one_rank_is_no_abort(tmp_path: Path) -> None:
    """The watching thread was inside torch when the interpreter ended: SIGABRT."""
    for _ in range(2):
        done = run_script(tmp_path, "exit")
        assert [rank.returncode for rank in done] == [3, 3, 3], done
        assert "ends, because rank 1 on" in done[0].stderr
        assert "exited with 3" in done[0].stderr


@pytest.mark.parametrize("how", ["forget to close", "catch"])
def test_script_that_does_not_close_its_world_ends_well(tmp_path: Path, how: str) -> None:
    done = run_script(tmp_path, how)
    assert [rank.returncode for rank in done] == [0, 0, 0], done
    assert all(rank.stdout == "end of the script\n" for rank in done)
    assert all("terminate called" not in rank.stderr for rank in done)


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:52914",
        "Application timeout caused pair closure",
        "Timed out waiting 40000ms for recv operation to complete",
        "Read timeout 127.0.0.1",
        "NCCL communicator was aborted on rank 3",
    ],
)
def test_collective_that_another_rank_breaks_is_no_cause(text: str) -> None:
    """The rank looks for the cause before it reports itself."""
    assert is_failed_collective(RuntimeError(text))
    assert not is_failed_collective(ValueError(text))
