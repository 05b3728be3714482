"""Where a run's metrics go: one record (a flat dict) at a time, on rank 0."""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_slurm.errors import DdpSlurmError

Record = dict[str, Any]
Recorder = Callable[[Record], None]

COLUMNS = (
    "kind",
    "epoch",
    "step",
    "loss",
    "accuracy",
    "images_per_second",
    "learning_rate",
    "seconds",
)


class JsonLines:
    """Appends each record as one line of JSON.

    A resumed run first drops the records after the snapshot's step, so that the file reads like one run's.
    """

    def __init__(self, path: str | Path, resumed_step: int = 0) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = [
                line
                for line in self.path.read_text().splitlines()
                if _step_of(line) <= resumed_step
            ]
            _replace_text(self.path, "".join(f"{line}\n" for line in kept if resumed_step))

    def __call__(self, record: Record) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")


class CsvFile:
    """Appends each record as one line with the columns ``COLUMNS``; resumes as ``JsonLines`` does."""

    def __init__(self, path: str | Path, resumed_step: int = 0) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[Record] = []
        if self.path.exists() and resumed_step:
            with open(self.path, newline="") as file:
                kept = [row for row in csv.DictReader(file) if (row.get("step") or "").isdigit()]
                kept = [row for row in kept if int(row["step"]) <= resumed_step]
        _replace_text(self.path, ",".join(COLUMNS) + "\n")
        for row in kept:
            self(row)

    def __call__(self, record: Record) -> None:
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore").writerow(record)


class TensorBoard:
    """Writes the numbers of each record as scalars; needs the tensorboard package."""

    def __init__(self, folder: str | Path, resumed_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise DdpSlurmError(
                f"TensorBoard metrics need the package tensorboard ({error})"
            ) from error
        self._writer = SummaryWriter(os.path.expanduser(folder), purge_step=resumed_step + 1)

    def __call__(self, record: Record) -> None:
        for name, value in record.items():
            if name not in ("kind", "epoch", "step") and isinstance(value, int | float):
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        self._writer.flush()


def open_recorder(path: str, resumed_step: int = 0) -> Recorder:
    """The recorder that a path asks for: ``.csv``, ``.jsonl``, or a folder for TensorBoard (with a trailing slash)."""
    try:
        if path.endswith("/"):
            return TensorBoard(path, resumed_step)
        if path.endswith(".csv"):
            return CsvFile(path, resumed_step)
        if path.endswith(".jsonl"):
            return JsonLines(path, resumed_step)
    except (OSError, UnicodeDecodeError) as error:
        raise DdpSlurmError(f"metrics cannot be written to {path}: {error}") from error
    raise DdpSlurmError(
        f"metrics path {path!r} must end in .csv, .jsonl or / (a TensorBoard folder)"
    )


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**63  # a line cut off by a kill


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text)
    temporary.replace(path)
