"""Metrics of a run in files."""

import csv
import json
import sys
from pathlib import Path

import pytest

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.trainer.records import open_recorder


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv"])
def test_recorder_of_a_resumed_run_reads_like_one_run(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new folder" / name
    recorder = open_recorder(str(path))
    for step in (1, 2, 3):
        recorder({"kind": "train", "epoch": 1, "step": step, "loss": 1 / step})
    with open(path, "a") as file:
        file.write('{"kind": "tr' if name.endswith("jsonl") else "")  # a line that a kill cut off
    recorder = open_recorder(str(path), resumed_step=2)
    recorder({"kind": "train", "epoch": 1, "step": 3, "loss": 0.25})
    if name.endswith("jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [
        (1, 1.0),
        (2, 0.5),
        (3, 0.25),
    ]
    open_recorder(str(path))  # a new run begins from scratch
    assert len(path.read_text().splitlines()) == (0 if name.endswith("jsonl") else 1)


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv"])
def test_recorder_path_that_cannot_be_written_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / name, tmp_path / "file" / name):
        with pytest.raises(DdpSlurmError, match="metrics cannot be written to"):
            open_recorder(str(path), resumed_step=1)


def test_recorder_replaces_a_foreign_table(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("a,b\n1,2\n")
    open_recorder(str(tmp_path / "m.csv"), resumed_step=1)
    assert (tmp_path / "m.csv").read_text().startswith("kind,epoch,step,")


def test_tensorboard_reads_a_resumed_run_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "board"
    recorder = open_recorder("~/board/")
    for step in (1, 2, 3):
        recorder({"kind": "train", "epoch": 1, "step": step, "loss": float(step), "device": "cpu"})
    recorder = open_recorder(f"{folder}/", resumed_step=2)
    recorder({"kind": "train", "epoch": 1, "step": 3, "loss": 0.5})
    recorder({"kind": "evaluation", "epoch": 1, "step": 3, "accuracy": 0.25})
    # Here: only the process of this test waits for the import.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder)).Reload()
    assert sorted(board.Tags()["scalars"]) == ["evaluation/accuracy", "train/loss"]
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 0.5),
    ]


def test_tensorboard_missing_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(DdpSlurmError, match="TensorBoard metrics need the package tensorboard"):
        open_recorder(f"{tmp_path}/")


def test_recorder_path_with_another_ending_is_refused() -> None:
    with pytest.raises(DdpSlurmError, match=r"metrics path 'loss\.txt' must end in"):
        open_recorder("loss.txt")
