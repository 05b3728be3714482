"""Which piece the server gives to whom."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.tracker import SILENT_SECONDS, Report, Tracker

PIECES = 6


def report(number: int, have: int = 0, **fields: Any) -> Report:
    values = {"id": f"{number:08x}", "job": "job", "node": str(number), "ready": False}
    return Report(**{**values, "url": f"http://node{number}:1", "have": have, **fields})


class Clock:
    """A clock that stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.integers(0, 2), min_size=PIECES, max_size=30))
def test_tracker_gives_each_piece_once(askers: list[int]) -> None:
    tracker = Tracker(PIECES)
    for number in range(3):
        tracker.add(report(number))
    given_pieces = [tracker.give(report(number).id) for number in askers]
    assert given_pieces == [*range(PIECES), *[None] * (len(askers) - PIECES)]


def test_tracker_gives_what_a_silent_node_had_again() -> None:
    clock = Clock()
    tracker = Tracker(2, clock)
    tracker.add(report(0))
    tracker.add(report(1, have=0b10))
    assert tracker.give(report(0).id) == 0
    assert tracker.give(report(0).id) is None
    clock.now = SILENT_SECONDS + 1
    tracker.add(report(2))
    assert [tracker.give(report(2).id) for _ in range(3)] == [0, 1, None]


def test_tracker_gives_a_piece_that_did_not_arrive_again() -> None:
    tracker = Tracker(1)
    tracker.add(report(0))
    assert tracker.give(report(0).id) == 0
    tracker.take_back(0)
    assert tracker.give(report(0).id) == 0


def test_tracker_gives_what_a_leaving_node_had_again() -> None:
    tracker = Tracker(1)
    tracker.add(report(0, have=1, ready=True))
    tracker.add(report(1))
    assert tracker.give(report(1).id) is None
    tracker.add(report(0, url=None, ready=True))
    assert tracker.give(report(1).id) == 0


def test_tracker_gives_nothing_to_a_node_it_does_not_know() -> None:
    assert Tracker(1).give(report(0).id) is None


def test_answer_lists_peers_and_the_ready_nodes_of_the_job() -> None:
    tracker = Tracker(PIECES)
    tracker.add(report(0, have=0b101))
    tracker.add(report(1, ready=True, have=0b111111, node="a"))
    tracker.add(report(2, ready=True, url=None, node="a"))  # another rank of that node
    tracker.add(report(3, ready=True, job="other", url=None))
    answer = tracker.add(report(4))
    assert answer["ready"] == 1
    assert {peer["id"]: int(peer["have"], 16) for peer in answer["peers"]} == {
        report(0).id: 0b101,
        report(1).id: 0b111111,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "x"),
        ("have", f"{1 << PIECES:x}"),
        ("have", "-1"),
        ("url", "file:///etc/passwd"),
        ("node", "a\nb"),
        ("job", 7),
    ],
)
def test_report_refuses_what_no_node_sends(field: str, value: object) -> None:
    data = report(0).to_json()
    assert Report.read(data, PIECES) == report(0)
    with pytest.raises(DataSetError, match="not a node's report"):
        Report.read({**data, field: value}, PIECES)
