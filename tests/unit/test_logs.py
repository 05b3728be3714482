"""Reading a growing log, and one rank's lines."""

from pathlib import Path

import pytest

from ddp_slurm.runs.log import GrowingLog, RankFilter, tail

LINES = {
    "4: x": 4,
    "04: x": 4,
    " 4: x": 4,
    "[4 alpha] x": 4,
    "[ 4 alpha] x": 4,
    "14: x": 14,
    "[14 alpha] x": 14,
    "40: x": 40,
    "x 4: x": None,
    "srun: error: 4: x": None,
    "[alpha] x": None,
}


@pytest.mark.parametrize("rank", [4, 14, 40, 0])
def test_rank_filter(rank: int) -> None:
    keep = RankFilter(rank)
    assert [line for line in LINES if keep(line)] == [
        line for line, owner in LINES.items() if owner == rank
    ]
    assert {keep.text(line) for line in LINES if keep(line)} <= {"x"}


def test_labels_keep_what_follows() -> None:
    assert RankFilter(1).text("1:   indented: 2") == "  indented: 2"
    assert RankFilter(1).text("1: ") == ""


def test_growing_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = GrowingLog(path)
    assert list(log.new_lines()) == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert list(log.new_lines()) == ["one"]
        file.write(b"o\n" + "ü".encode()[:1])
        assert list(log.new_lines()) == ["two"]
        file.write("ü".encode()[1:] + b"\xff\nlast")
        assert list(log.new_lines()) == ["ü\ufffd"]
        assert list(log.new_lines()) == []
        file.write(b"\xff")
        assert list(log.new_lines(ended=True)) == ["last\ufffd"]
        assert list(log.new_lines(ended=True)) == []
        file.truncate(0)
        file.write(b"again\n")
        assert list(log.new_lines()) == ["again"]


def test_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path) == ""
    path.write_text("one\n\ntwo")
    assert tail(path) == "one\n\ntwo"
    path.write_text("x" * 100_000 + "\n" + "".join(f"line {i}\n" for i in range(50)))
    assert tail(path, 3) == "line 47\nline 48\nline 49"
