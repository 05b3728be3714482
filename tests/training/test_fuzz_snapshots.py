"""Whatever is in the file of a snapshot: its state, or an error of our own."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_slurm.training import Snapshot
from tests.fuzzing import fuzz, holds, no_write_outside

PLACES = st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=6)), max_size=5)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """A snapshot, another program's file, and one of the first version."""
    path = tmp_path_factory.mktemp("valid") / "snapshot.pt"
    state = {"model": {"w": torch.arange(6.0)}, "step": 3}
    Snapshot(path).save(state)
    others = []
    for content in (state, {"format": "ddp_slurm snapshot", "version": 1, "state": state}):
        file = io.BytesIO()
        torch.save(content, file)
        others.append(file.getvalue())
    return [path.read_bytes(), *others]


@fuzz
@given(kind=st.integers(0, 2), cut=st.floats(0, 1) | st.just(1.0), places=PLACES)
def test_any_snapshot_file_is_read_or_refused(
    files: list[bytes],
    tmp_path_factory: pytest.TempPathFactory,
    kind: int,
    cut: float,
    places: list[tuple[float, bytes]],
) -> None:
    data = files[kind]
    data = data[: int(cut * len(data))]
    for place, piece in places:
        start = int(place * len(data))
        data = data[:start] + piece + data[start + len(piece) :]
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    (folder / "snapshot.pt").write_bytes(data)
    with no_write_outside(folder):
        holds(Snapshot(folder / "snapshot.pt").load)
