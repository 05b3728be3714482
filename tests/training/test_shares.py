"""The shares that a loop of one's own gets are those that the job asks for, or none."""

from pathlib import Path

import pytest

from .joining import ask_for_shares
from .worlds import run_world

MEASURED = {"DDP_SLURM_BALANCE": "measured"}
SLOW_AND_FAST = [0.008, 0.002]


@pytest.mark.parametrize("data", ["batch", "data set", "list"])
def test_measured_shares_follow_the_ranks_speeds(tmp_path: Path, data: str) -> None:
    found = run_world(tmp_path, (1, 1), ask_for_shares, SLOW_AND_FAST, data, environ=MEASURED)
    assert found[0] == found[1]
    assert found[0] in ([2, 8], [3, 7])


@pytest.mark.parametrize(
    ("planned", "shares"), [({}, [5, 5]), ({"DDP_SLURM_SHARES": "1,4"}, [2, 8])]
)
@pytest.mark.parametrize("kind", ["batch", "planned"])
def test_planned_shares_are_taken_where_none_are_measured(
    tmp_path: Path, planned: dict[str, str], shares: list[int], kind: str
) -> None:
    environ = {"DDP_SLURM_BALANCE": "equal", **planned}
    found = run_world(tmp_path, (1, 1), ask_for_shares, SLOW_AND_FAST, kind, environ=environ)
    assert found == [shares, shares]


def test_planned_shares_of_a_measured_job_are_refused(tmp_path: Path) -> None:
    found = run_world(tmp_path, (1, 1), ask_for_shares, SLOW_AND_FAST, "planned", environ=MEASURED)
    for text in found:
        assert "the job asks for measured shares (--balance measured)" in text
        assert "replace world.planned_shares(10) with world.shares(10, model," in text


@pytest.mark.parametrize("kind", ["batch", "planned"])
def test_adaptive_shares_of_a_loop_are_refused(tmp_path: Path, kind: str) -> None:
    environ = {"DDP_SLURM_BALANCE": "adaptive"}
    for text in run_world(tmp_path, (1, 1), ask_for_shares, SLOW_AND_FAST, kind, environ=environ):
        assert "(--balance adaptive), which only the Trainer can change" in text


def test_one_rank_needs_no_measuring(tmp_path: Path) -> None:
    assert run_world(tmp_path, (1,), ask_for_shares, [0.0], "planned", environ=MEASURED) == [[10]]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("stream", "has no length; to measure with a stream"), ("empty", "no sample")],
)
def test_data_that_cannot_be_measured_is_refused(tmp_path: Path, kind: str, text: str) -> None:
    found = run_world(tmp_path, (1, 1), ask_for_shares, SLOW_AND_FAST, kind, environ=MEASURED)
    assert all(text in error for error in found)
