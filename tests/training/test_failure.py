"""A rank that fails, is killed, hangs or leaves early ends all others in bounded time, and the log
names it."""

import signal
from pathlib import Path

import pytest

from .joining import (
    be_late,
    fail_after_rank_0_has_left,
    fail_at_three,
    fail_without_collective,
)
from .worlds import PATIENCE_SECONDS, run_world, world


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
                f"rank {rank} on node: ends, because rank 3 on node failed: ValueError: a bad sample"
                in logs[rank]
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


def test_rank_0_waits_as_long_as_a_collective_would(tmp_path: Path) -> None:
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
