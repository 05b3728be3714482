"""Where a run's metrics go: one record (a flat dict) at a time, on rank 0."""

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddp_slurm.console import show
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.files import write_whole

Record = dict[str, Any]
Recorder = Callable[[Record], None]

COLUMNS = (
    "kind",
    "epoch",
    "step",
    "loss",
    "accuracy",
    "images_per_second",
    "shares",
    "learning_rate",
    "seconds",
)
INCOMPLETE_LINE = 2**63
"""The step of a line that a kill cut off: after any snapshot's."""


class Records:
    """Gives each record to all recorders. One that cannot write is left out from then on."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = list(recorders)

    def add(self, recorder: Recorder) -> None:
        self._recorders.append(recorder)

    def __call__(self, record: Record) -> None:
        for recorder in list(self._recorders):
            try:
                recorder(record)
            except OSError as error:
                self._recorders.remove(recorder)
                show(f"warning: metrics are no longer written: {error}")


class JsonLines:
    """Appends each record as one line of JSON.

    A resumed run first drops the records after the snapshot's step, so that the file reads like
    that of one run.
    """

    def __init__(self, path: str | Path, resumed_step: int = 0) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        kept = []
        if resumed_step:
            lines = self.path.read_text().splitlines()
            kept = [line for line in lines if _step_of(line) <= resumed_step]
        write_whole(self.path, "".join(f"{line}\n" for line in kept))

    def __call__(self, record: Record) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")


class CsvFile:
    """Appends each record as one line with the columns ``COLUMNS``; resumes as JsonLines does."""

    def __init__(self, path: str | Path, resumed_step: int = 0) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO(newline="")
        writer = _csv_writer(text)
        writer.writeheader()
        if self.path.exists() and resumed_step:
            writer.writerows(self._rows_until(resumed_step))
        write_whole(self.path, text.getvalue())

    def _rows_until(self, step: int) -> list[Record]:
        with open(self.path, newline="") as file:
            rows = list(csv.DictReader(file))
        numbered = [row for row in rows if (row.get("step") or "").isdecimal()]
        return [row for row in numbered if int(row["step"]) <= step]

    def __call__(self, record: Record) -> None:
        with open(self.path, "a", newline="") as file:
            _csv_writer(file).writerow(record)


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
    """The recorder for a path: ``.csv``, ``.jsonl``, or a TensorBoard folder (trailing slash).

    Raises DdpSlurmError with the path if it has another ending or cannot be written.
    """
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


def _csv_writer(file: Any) -> "csv.DictWriter[str]":
    return csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return INCOMPLETE_LINE
