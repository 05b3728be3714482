"""A Trainer on the ranks of a test world; a kill, a signal or a full disk at a chosen moment."""

import builtins
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_slurm.training import Snapshot, Trainer, init_distributed
from ddp_slurm.training.data import Batch, DatasetSource, ResidentTensors, Span
from ddp_slurm.training.process_group import failure

from .workers import CLASSES, FEATURES, NoisyData, flat, make_data, make_model
from .worlds import tell


@dataclass(frozen=True)
class Run:
    """``kill`` is (rank, kind, n): the rank dies at its n-th moment of that kind, see ``_Killer``.

    ``usr2`` is (rank, step) of a signal; ``fill`` is (file, step): it takes the rest of its disk.
    """

    shares: tuple[int, ...]
    snapshot: Path
    samples: int = 44
    epochs: int = 3
    save_every_steps: int | None = 2
    stateful: bool = True
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    kill: tuple[int, str, int] | None = None
    usr2: tuple[int, int] | None = None
    fill: tuple[Path, int] | None = None
    poison: tuple[int, int] | None = None
    noisy: bool = False
    frozen: bool = False


@dataclass
class Report:
    finished: bool
    step: int
    first_step: int
    metrics: dict[str, float]
    weights: Tensor
    seen: list[list[int]]
    own_batchnorm: list[float]
    moments: list[str]
    shares: list[int]
    records: list[dict[str, Any]]
    largest_batch: int


def full_disk(record: dict[str, Any]) -> None:
    raise OSError(28, "No space left on device")


def fill_disk(path: Path) -> None:
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


class StatefulModel(nn.Module):
    """With dropout and BatchNorm: random state and buffers that a snapshot has to carry."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, CLASSES),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(inputs)))
        outputs: Tensor = self.last(nn.functional.dropout(hidden, 0.3, self.training))
        return outputs


class RecordingSource(ResidentTensors):
    """Notes the indices it gave, per step."""

    seen: list[list[int]]

    def batches(self, order: Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        for span, batch in zip(spans, super().batches(order, spans, epoch), strict=True):
            self.seen.append(order[span[0] : span[1]].tolist())
            yield batch


class _Killer:
    """Counts the moments of a rank's life (steps; write, fsync, rename), and ends it at one.

    ``kind`` is a part of the name of a moment: of "before replace", for example.
    """

    def __init__(self, kind: str, at: int | None) -> None:
        self.kind, self.at, self.moments = kind, at, list[str]()

    def moment(self, name: str) -> None:
        self.moments.append(name)
        if self.kind in name and self._count() == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _count(self) -> int:
        return sum(self.kind in name for name in self.moments)

    def watch(self, snapshot: Path) -> None:
        """Instrument this process. Half of a write reaches the file before the kill."""
        real_open = builtins.open

        def opened(path: Any, *args: Any, **options: Any) -> Any:
            file = real_open(path, *args, **options)
            if str(path).endswith(".writing") and str(path).startswith(str(snapshot.parent)):
                write = file.write

                def in_halves(data: Any) -> int:
                    data = bytes(data)
                    write(data[: len(data) // 2])
                    self._flush_and_note(file)
                    write(data[len(data) // 2 :])
                    return len(data)

                file = _Wrapped(file, in_halves)
            return file

        builtins.open = opened  # type: ignore[assignment]
        for name in ("fsync", "replace"):
            setattr(os, name, self._around(name, getattr(os, name)))
        torch.optim.SGD.step = self._around("step", torch.optim.SGD.step)  # type: ignore[method-assign]

    def _flush_and_note(self, file: Any) -> None:
        if self.kind == "write" and self._count() + 1 == self.at:
            file.flush()
        self.moment("write")

    def _around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **options: Any) -> Any:
            self.moment(f"before {name}")
            result = function(*args, **options)
            self.moment(f"after {name}")
            return result

        return around


class _Wrapped:
    """A file whose ``write`` is another function."""

    def __init__(self, file: Any, write: Callable[[Any], int]) -> None:
        self._file, self.write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_Wrapped":
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()


def train(pipe: Connection, run: Run) -> Report:
    """Tells the step it resumes from before it trains."""
    failure.LAST_WORDS_SECONDS = 0.2  # a killed rank reads no last words
    with init_distributed() as world:
        killer = (
            _Killer(*run.kill[1:]) if run.kill and run.kill[0] == world.rank else _Killer("", None)
        )
        killer.watch(run.snapshot)
        inputs, targets = make_data(run.samples, run.dtype)
        if run.poison:
            inputs[run.poison[0]] = float("inf")
        data: Any = RecordingSource(inputs, targets, world.device)
        data.seen = []
        if run.noisy:
            data = DatasetSource(NoisyData(inputs, targets), world.device)
            data.seen = []
        torch.manual_seed(1)
        model = StatefulModel().to(run.dtype) if run.stateful else make_model(run.dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if run.frozen:
            model.norm.eval()
        records: list[dict[str, Any]] = []
        trainer = Trainer(
            world,
            model,
            optimizer,
            cross_entropy,
            data,
            ResidentTensors(*make_data(19, run.dtype), world.device),
            **{
                "global_batch": sum(run.shares),
                "shares": run.shares,
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
                "snapshot": Snapshot(run.snapshot, world.control),
                "total_epochs": run.epochs,
                "save_every_steps": run.save_every_steps,
                "recorders": [records.append],
                "precision": "fp32",
                **run.options,
            },
        )
        sizes: list[int] = []
        model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
        first_step = -1

        def before_step(*args: object) -> None:
            nonlocal first_step
            if first_step < 0:
                first_step = trainer.step
                tell(pipe, first_step)
            if run.usr2 == (world.rank, trainer.step):
                os.kill(os.getpid(), signal.SIGUSR2)
            if run.fill and world.rank == 0 and trainer.step == run.fill[1]:
                fill_disk(run.fill[0])

        optimizer.register_step_pre_hook(before_step)
        result = trainer.train()
        if first_step < 0:  # killed after the last snapshot: nothing was left to do
            tell(pipe, result.step)
        return Report(
            result.finished,
            result.step,
            first_step,
            result.metrics,
            flat(model.state_dict().values()),
            data.seen,
            [
                float(value)
                for name, value in model.state_dict().items()
                if name == "norm.running_mean"
                for value in value
            ],
            killer.moments,
            trainer.sampler.shares,
            records,
            max(sizes, default=0),
        )
