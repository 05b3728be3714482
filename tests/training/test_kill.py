"""Killed anywhere, a run continues from its last whole snapshot and ends with the same bits."""

import random
import subprocess
from collections import Counter
from dataclasses import replace
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


def train_uninterrupted(folder: Path, tasks: tuple[int, ...], settings: Run) -> list[Report]:
    with world(folder, tasks, train, replace(settings, snapshot=folder / "snapshot.pt")) as running:
        reports = finish(running)
    assert reports is not None, running.all_logs()
    return reports


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return train_uninterrupted(folder, TASKS, Run(SHARES, folder))


def left_over(path: Path) -> list[Path]:
    """Files of a write that a kill interrupted."""
    return list(path.parent.glob(f".{path.name}.*.writing"))


def assert_same_end(found: list[Report], expected: list[Report]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.finished
        assert mine.step == theirs.step == 18
        assert torch.equal(mine.weights, theirs.weights)  # bitwise: weights, BatchNorm, counters
        assert mine.metrics == theirs.metrics


LATEST = {"step": 8, "write": 300, "fsync": 8, "replace": 8}
"""The last moment for a kill: within the first two or three snapshots of a life."""


@pytest.mark.parametrize(
    ("tasks", "settings", "kills", "least_of_a_kind"),
    [
        (TASKS, Run(SHARES, Path()), 52, 8),
        ((1, 2), Run((3, 2, 3), Path(), samples=48), 10, 1),
        ((1, 2, 4), Run((2, 0, 2, 2, 2, 2, 6), Path(), samples=96), 10, 1),
    ],
    ids=["2 ranks", "3 ranks", "7 ranks"],
)
def test_kills_at_any_moment_change_no_bit_of_the_end(
    tmp_path: Path, tasks: tuple[int, ...], settings: Run, kills: int, least_of_a_kind: int
) -> None:
    """Lives of random length: a rank dies in a step, or rank 0 in a write, fsync or rename."""
    chance = random.Random(2026)
    expected = train_uninterrupted(tmp_path / "uninterrupted", tasks, settings)
    total, kinds, chain = 0, Counter[str](), 0
    while total < kills:
        chain += 1
        path = tmp_path / f"chain{chain}" / "snapshot.pt"
        step = 0
        while True:
            kind = chance.choice(list(LATEST))
            rank = chance.choice([0, 1]) if kind == "step" else 0
            kill = (rank, kind, chance.randint(1, LATEST[kind]))
            run = replace(settings, snapshot=path, kill=kill)
            with world(tmp_path / f"logs{total}", tasks, train, run) as running:
                begun = resumed_at(running)
                reports = finish(running)
                log = running.all_logs()
            if begun is not None:
                assert begun >= step, log  # never behind a snapshot that was whole
                step = begun
            if reports is not None:
                assert_same_end(reports, expected)
                break
            assert running.processes[rank].exitcode == -9, log
            assert "warning" not in log  # no kill damages a file under its final name
            total += 1
            kinds[kind] += 1
            assert kind != "write" or left_over(path)
    assert min(kinds[kind] for kind in LATEST) >= least_of_a_kind, kinds


def test_snapshot_is_on_the_disk_before_it_gets_its_name(uninterrupted: list[Report]) -> None:
    moments = uninterrupted[0].moments
    assert {"write", "before fsync", "after fsync", "before replace", "after replace"} <= set(
        moments
    )
    before_rename = {earlier for earlier, name in pairwise(moments) if name == "before replace"}
    assert before_rename == {"after fsync", "after replace"}


def test_kill_in_a_write_and_damage_lead_to_the_previous(
    tmp_path: Path, uninterrupted: list[Report]
) -> None:
    """Whole after steps 2 and 4; rank 0 dies in the third write, and the second is damaged."""
    path, moments = tmp_path / "snapshot.pt", uninterrupted[0].moments
    third_fsync = [place for place, name in enumerate(moments) if name == "before fsync"][
        4
    ]  # two a snapshot
    writes = moments[:third_fsync].count("write") - 1
    with world(
        tmp_path / "killed", TASKS, train, Run(SHARES, path, kill=(0, "write", writes))
    ) as running:
        assert finish(running) is None
    assert left_over(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with world(tmp_path / "resumed", TASKS, train, Run(SHARES, path)) as running:
        assert resumed_at(running) == 2
        reports = finish(running)
        log = running.log(0)
    assert "is damaged or no snapshot" in log
    assert f"using {path}.previous instead" in log
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
        full = Run(SHARES, path, fill=(filler, 7))
        with world(tmp_path / "full", TASKS, train, full) as running:
            assert resumed_at(running) == 6
            assert all(status not in (0, None) for status in running.wait())
            log = running.log(0)
        assert "warning: cannot write the snapshot" in log
        # The training went on to its end, and the failure of the last snapshot is an error.
        assert "epoch 3/3" in log
        assert "rank 0 on" in log.splitlines()[-1]
        assert "cannot write the snapshot" in log.splitlines()[-1]
        with world(tmp_path / "still full", TASKS, train, Run(SHARES, path)) as running:
            assert running.wait() == [2, 2]
            log = running.log(0)
        assert "No space left on device (ENOSPC); each snapshot needs" in log
        assert "  step " not in log
        filler.unlink()
        with world(tmp_path / "freed", TASKS, train, Run(SHARES, path)) as running:
            assert resumed_at(running) == 6
            reports = finish(running)
        assert reports is not None
        assert_same_end(reports, uninterrupted)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
