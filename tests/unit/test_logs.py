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
    of_rank = RankFilter(rank)
    expected = [line for line, owner in LINES.items() if owner == rank]
    assert of_rank.lines("\n".join(LINES)).splitlines() == expected
    texts = {line: of_rank.text(line) for line in LINES}
    assert [line for line, text in texts.items() if text is not None] == expected
    assert {texts[line] for line in expected} <= {"x"}


def test_labels_keep_what_follows() -> None:
    assert RankFilter(1).text("1:   indented: 2") == "  indented: 2"
    assert RankFilter(1).text("1: ") == ""


def new_text(log: GrowingLog, *, ended: bool = False) -> str:
    return "".join(log.new_text(ended=ended))


def test_growing_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = GrowingLog(path)
    assert new_text(log) == ""
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert new_text(log) == "one\n"
        file.write(b"o\n" + "ü".encode()[:1])
        assert new_text(log) == "two\n"
        file.write("ü".encode()[1:] + b"\xff\nlast")
        assert new_text(log) == "ü\ufffd\n"
        assert new_text(log) == ""
        file.write(b"\xff")
        assert new_text(log, ended=True) == "last\ufffd\n"
        assert new_text(log, ended=True) == ""
        file.truncate(0)
        file.write(b"again\n")
        assert new_text(log) == "again\n"


def test_growing_log_reads_lines_of_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_slurm.runs.log.CHUNK_BYTES", 4)
    path = tmp_path / "log"
    text = "\n".join("é" * length for length in range(12)) + "\n\n"
    path.write_text(text)
    pieces = list(GrowingLog(path).new_text())
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)


def test_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path) == ""
    path.write_text("one\n\ntwo")
    assert tail(path) == "one\n\ntwo"
    path.write_text("x" * 100_000 + "\n" + "".join(f"line {i}\n" for i in range(50)))
    assert tail(path, 3) == "line 47\nline 48\nline 49"
