"""Killed anywhere, a run goes on from its last whole snapshot and ends as if nothing had happened."""

import contextlib
import random
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from .trainer_worker import Report, Run, train
from .worlds import World, world

SHARES = (3, 5)
TASKS = (1, 1)


def finish(running: World) -> list[Report] | None:
    """The reports, or None where the ranks were killed."""
    statuses = running.wait()
    if statuses != [0] * len(statuses):
        return None
    reports = []
    for rank in range(len(statuses)):
        message = running.receive(rank)
        while not isinstance(message, Report):
            message = running.receive(rank)
        reports.append(message)
    return reports


def resumed_at(running: World) -> int | None:
    """The step a life began with, or None where it ended before its first step."""
    try:
        message = running.receive(0)
    except AssertionError:
        return None
    return message if isinstance(message, int) else None


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    with world(folder, TASKS, train, Run(SHARES, folder / "snapshot.pt")) as running:
        reports = finish(running)
    assert reports is not None, running.all_logs()
    return reports


def assert_same_end(found: list[Report], expected: list[Report]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.finished
        assert mine.step == theirs.step == 18
        assert torch.equal(mine.weights, theirs.weights)  # bitwise: weights, BatchNorm, counters
        assert mine.metrics == theirs.metrics


def test_fifty_kills(tmp_path: Path, uninterrupted: list[Report]) -> None:
    """Lives of random length, one after another: rank 0 dies in a step, write, fsync or rename, or rank 1 in a step."""
    chance = random.Random(2026)
    total, kinds, chain = 0, Counter[str](), 0
    latest = {
        "step": 8,
        "write": 300,
        "fsync": 8,
        "replace": 8,
    }  # within the first two or three snapshots of a life
    moments = uninterrupted[0].moments
    assert {"write", "before fsync", "after fsync", "before replace", "after replace"} <= set(
        moments
    )
    before_rename = {earlier for earlier, name in pairwise(moments) if name == "before replace"}
    assert before_rename == {"after fsync", "after replace"}  # on the disk before it gets its name
    while total < 52:
        chain += 1
        path = tmp_path / f"chain{chain}" / "snapshot.pt"
        step = 0
        while True:
            kind = chance.choice(list(latest))
            rank = chance.choice([0, 1]) if kind == "step" else 0
            run = Run(SHARES, path, kill=(rank, kind, chance.randint(1, latest[kind])))
            with world(tmp_path / f"logs{total}", TASKS, train, run) as running:
                begun = resumed_at(running)
                reports = finish(running)
                log = running.all_logs()
            if begun is not None:
                assert begun >= step, log  # never behind a snapshot that was whole
                step = begun
            if reports is not None:
                assert_same_end(reports, uninterrupted)
                break
            assert running.processes[rank].exitcode == -9, log
            assert "warning" not in log  # no kill damages a file under its final name
            total += 1
            kinds[kind] += 1
            assert kind != "write" or path.with_name(".snapshot.pt.writing").exists()
    assert min(kinds[kind] for kind in latest) >= 8, kinds


def test_kill_in_a_write_and_damage_lead_to_the_previous(
    tmp_path: Path, uninterrupted: list[Report]
) -> None:
    """Two files are whole after steps 2 and 4, rank 0 dies in the write of the third, and the second is damaged."""
    path, moments = tmp_path / "snapshot.pt", uninterrupted[0].moments
    third_fsync = [place for place, name in enumerate(moments) if name == "before fsync"][
        4
    ]  # two a snapshot
    writes = moments[:third_fsync].count("write") - 1
    with world(
        tmp_path / "killed", TASKS, train, Run(SHARES, path, kill=(0, "write", writes))
    ) as running:
        assert finish(running) is None
    assert path.with_name(".snapshot.pt.writing").exists()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with world(tmp_path / "resumed", TASKS, train, Run(SHARES, path)) as running:
        assert resumed_at(running) == 2
        reports = finish(running)
        log = running.log(0)
    assert "is damaged or no snapshot" in log
    assert f"taking {path}.previous instead" in log
    assert reports is not None
    assert_same_end(reports, uninterrupted)


def test_full_disk_costs_the_steps_since_the_last_snapshot(
    tmp_path: Path, uninterrupted: list[Report]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr.strip()}")
    try:
        path = disk / "snapshot.pt"
        with world(
            tmp_path / "killed", TASKS, train, Run(SHARES, path, kill=(1, "step", 15))
        ) as running:
            assert finish(running) is None  # rank 1 died after seven steps
        filler = disk / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        with world(tmp_path / "full", TASKS, train, Run(SHARES, path)) as running:
            assert resumed_at(running) == 6
            assert all(status not in (0, None) for status in running.wait())
            log = running.log(0)
        assert "warning: cannot write the snapshot" in log
        assert (
            "epoch 3/3" in log
        )  # the training went on to its end, and the failure of the last snapshot is an error
        assert "rank 0 on" in log.splitlines()[-1]
        assert "cannot write the snapshot" in log.splitlines()[-1]
        filler.unlink()
        with world(tmp_path / "freed", TASKS, train, Run(SHARES, path)) as running:
            assert resumed_at(running) == 6
            reports = finish(running)
        assert reports is not None
        assert_same_end(reports, uninterrupted)
    finally:
        subprocess.run(["umount", disk], check=True)
