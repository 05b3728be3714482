"""A snapshot is there whole or not at all, and a damaged one gives way to the one before it."""

import collections
import enum
import os
import re
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_slurm.training import Snapshot, SnapshotError

from .snapshots import names, state, step
from .workers import load_on_every_rank
from .worlds import run_world


def test_snapshot_loads_the_newest_and_keeps_the_previous(snapshot: Snapshot) -> None:
    assert step(snapshot) == 2
    assert snapshot.warnings == []
    assert step(Snapshot(snapshot.previous, lock=False)) == 1
    assert names(snapshot.path.parent) == [
        ".snap shot.pt.lock",
        "snap shot.pt",
        "snap shot.pt.previous",
    ]


def test_snapshot_without_a_file_is_none(tmp_path: Path) -> None:
    assert Snapshot(tmp_path / "none.pt").load() is None


def test_snapshot_is_readable_with_torch_load(snapshot: Snapshot) -> None:
    content = torch.load(snapshot.path, weights_only=True)
    assert (content["format"], content["version"], content["state"]["step"]) == (
        "ddp_slurm snapshot",
        2,
        2,
    )


def test_snapshot_any_flipped_bit_leads_to_the_previous(tmp_path: Path) -> None:
    """Every single bit of a whole file, one after another."""
    snapshot = Snapshot(tmp_path / "s.pt")
    snapshot.save({"step": 1})
    snapshot.save({"step": 2})
    whole = bytearray(snapshot.path.read_bytes())
    with open(snapshot.path, "r+b") as file:
        for place, byte in enumerate(whole):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), place)
                assert snapshot.load() == {"step": 1}, (place, bit)
                assert "is damaged" in snapshot.warnings[0]
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert snapshot.load() == {"step": 2}
    assert snapshot.warnings == []


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_snapshot_damage_leads_to_the_previous(snapshot: Snapshot, data: st.DataObject) -> None:
    whole = snapshot.path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    length = data.draw(st.integers(1, 600))
    changed = {
        "cut": whole[:place],
        "zeros": whole[:place] + bytes(length) + whole[place + length :],
        "longer": whole + bytes(length),
    }
    damaged = changed[data.draw(st.sampled_from(list(changed)))]
    try:
        snapshot.path.write_bytes(damaged)
        assert step(snapshot) == (2 if damaged == whole else 1)
        if damaged != whole:
            assert f"using {snapshot.previous} instead" in snapshot.warnings[0]
    finally:
        snapshot.path.write_bytes(whole)


def test_snapshot_of_version_1_is_loaded(snapshot: Snapshot) -> None:
    """Written before snapshots had a digest."""
    torch.save({"format": "ddp_slurm snapshot", "version": 1, "state": state(5)}, snapshot.path)
    assert step(snapshot) == 5
    whole = snapshot.path.read_bytes()
    weights = whole.index(torch.full((4,), 5.0).numpy().tobytes())
    snapshot.path.write_bytes(whole[:weights] + b"?" + whole[weights + 1 :])
    assert step(snapshot) == 1
    assert "is damaged (checksum of " in snapshot.warnings[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is damaged or no snapshot"),
        (b"#!/bin/sh\n", "is damaged or no snapshot"),
        ({"model": {}}, "is not a snapshot of ddp_slurm (a torch file of another program)"),
        ([1, 2], "is not a snapshot of ddp_slurm (a torch file of another program)"),
        (
            {"format": "ddp_slurm snapshot", "version": 99, "state": {}},
            "has snapshot version 99, this program reads 1 and 2",
        ),
        (
            Path("/"),
            "is not a snapshot of ddp_slurm (UnpicklingError)",
        ),  # a pickle that would run code
    ],
    ids=["empty", "text", "another program's", "a list", "of the future", "a pickled object"],
)
def test_snapshot_foreign_file_leads_to_the_previous(
    snapshot: Snapshot, content: object, words: str
) -> None:
    if isinstance(content, bytes):
        snapshot.path.write_bytes(content)
    else:
        torch.save(content, snapshot.path)
    assert step(snapshot) == 1
    assert words in snapshot.warnings[0]
    snapshot.previous.unlink()
    with pytest.raises(SnapshotError) as caught:
        snapshot.load()
    assert words in str(caught.value)
    assert "No snapshot to resume from: move the file away, or give another path" in str(
        caught.value
    )


def test_snapshot_lost_file_leads_to_the_previous(snapshot: Snapshot) -> None:
    snapshot.path.unlink()  # killed between the two renames
    assert step(snapshot) == 1


@pytest.mark.parametrize(
    "value", [{1, 2}, torch.nn.Linear(1, 1), [lambda: None], {"a": {Path("/"): 1}}]
)
def test_snapshot_refuses_what_cannot_be_read_back(snapshot: Snapshot, value: object) -> None:
    with pytest.raises(SnapshotError, match=r"a snapshot cannot hold (key of )?state\['bad'\]"):
        snapshot.save({"bad": value})
    assert step(snapshot) == 2


class Kind(enum.IntEnum):
    ONE = 1


class Word(str, enum.Enum):
    A = "a"


Pair = collections.namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (0.1 * np.sqrt(4), 0.2),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.str_("s"), "s"),
        (Kind.ONE, 1),
        (Word.A, "a"),
        (Pair(1, [2]), (1, [2])),
        (collections.defaultdict(list, {"a": (Kind.ONE, True, None)}), {"a": (1, True, None)}),
    ],
)
def test_snapshot_writes_subclasses_as_plain_values(
    snapshot: Snapshot, value: object, read: object
) -> None:
    snapshot.save({"value": value})
    loaded = Snapshot(snapshot.path).load()
    assert loaded is not None
    assert repr(loaded["value"]) == repr(read)


def test_snapshot_damaged_does_not_replace_the_previous(snapshot: Snapshot) -> None:
    snapshot.path.write_bytes(b"damaged")
    assert step(snapshot) == 1
    snapshot.save(state(3))
    assert step(snapshot) == 3
    assert step(Snapshot(snapshot.previous, lock=False)) == 1
    snapshot.save(state(4))
    assert step(Snapshot(snapshot.previous, lock=False)) == 3


def test_snapshot_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="File name too long"):
        Snapshot(tmp_path / ("s" * 250)).load()


def test_snapshot_full_disk_keeps_the_existing_files(small_disk: Path) -> None:
    snapshot = Snapshot(small_disk / "snapshot.pt")
    snapshot.save(state(1))
    snapshot.save(state(2))
    with pytest.raises(SnapshotError) as caught:
        snapshot.save(state(3, size=50_000))
    assert re.search(
        r"cannot write the snapshot .*No space left on device \(ENOSPC\); each snapshot needs "
        r"200,000 bytes, up to three files exist at once, and [0-9,]+ bytes are free in .*disk; "
        "the one before it stays",
        str(caught.value),
    )
    assert step(snapshot) == 2
    assert names(small_disk) == [".snapshot.pt.lock", "snapshot.pt", "snapshot.pt.previous"]
    snapshot.save(state(4))  # and the next one fits again
    assert step(snapshot) == 4


def test_snapshot_file_size_limit_is_an_error(snapshot: Snapshot) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(SnapshotError, match="cannot write the snapshot"):
            snapshot.save(state(3, size=50_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert step(snapshot) == 2


def test_snapshot_path_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="cannot write the snapshot"):
        Snapshot(tmp_path / "file" / "snapshot.pt").save(state(1))


def test_snapshot_of_rank_0_reaches_all_ranks(tmp_path: Path) -> None:
    Snapshot(tmp_path / "rank0" / "snapshot.pt", lock=False).save(state(7, size=100_000))
    found = run_world(tmp_path / "logs", (1, 2), load_on_every_rank, tmp_path)
    assert [
        (kind, value["step"], value["model"]["weight"].sum().item()) for kind, value in found
    ] == [("state", 7, 700_000.0)] * 3


def test_snapshot_makes_a_gloo_group_beside_nccl(tmp_path: Path) -> None:
    Snapshot(tmp_path / "rank0" / "snapshot.pt", lock=False).save(state(7))
    found = run_world(tmp_path / "logs", (1, 1), load_on_every_rank, tmp_path, "nccl")
    assert [(kind, value["step"]) for kind, value in found] == [("state", 7)] * 2


def test_snapshot_unusable_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "snapshot.pt").write_bytes(b"no zip")
    found = run_world(tmp_path / "logs", (1, 2), load_on_every_rank, tmp_path)
    assert {kind for kind, _ in found} == {"fault"}
    assert len({text for _, text in found}) == 1
    assert "rank0/snapshot.pt is damaged or no snapshot" in found[2][1]


def test_snapshot_missing_is_none_on_every_rank(tmp_path: Path) -> None:
    assert (
        run_world(tmp_path / "logs", (1, 1), load_on_every_rank, tmp_path) == [("state", None)] * 2
    )
