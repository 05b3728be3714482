"""A Trainer on the ranks of a test world; a kill, a signal or a full disk at a chosen moment."""

import builtins
import contextlib
import multiprocessing
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

from ddp_slurm.training import BalancedSampler, Snapshot, Trainer, init_distributed
from ddp_slurm.training import World as RankWorld
from ddp_slurm.training.data import Batch, DatasetSource, ResidentTensors, Span
from ddp_slurm.training.process_group import failure

from .workers import CLASSES, FEATURES, NoisyData, flat, make_data, make_model
from .worlds import tell, world


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
    workers: int = 0
    """Of the loader of noisy data."""
    evaluates: bool = True
    frozen: bool = False
    ignored: int = 0
    """The first so many targets, whose weight is 0."""

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = make_data(self.samples, self.dtype)
        targets[: self.ignored] = -100
        return inputs, targets


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
        self.counts_steps = False
        """Not yet: a measurement at the start steps a copy of the optimizer."""

    def moment(self, name: str) -> None:
        if name.endswith(" step") and not self.counts_steps:
            return
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
    """Sends the step it resumes from before it trains."""
    failure.LAST_WORDS_SECONDS = 0.2  # a killed rank reads no last words
    with init_distributed() as world:
        killer = _Killer("", None)
        if run.kill and run.kill[0] == world.rank:
            killer = _Killer(*run.kill[1:])
        killer.watch(run.snapshot)
        torch.manual_seed(1)
        model = StatefulModel().to(run.dtype) if run.stateful else make_model(run.dtype)
        if run.frozen:
            model.norm.eval()
        data = _training_data(run, world)
        records: list[dict[str, Any]] = []
        trainer = _trainer(run, world, model, data, records)
        killer.counts_steps = True
        sizes: list[int] = []
        _record_sizes(model, sizes)
        first_step = _FirstStep(pipe, run, trainer)
        trainer.optimizer.register_step_pre_hook(first_step)
        result = trainer.train()
        if first_step.number < 0:  # killed after the last snapshot: nothing was left to do
            tell(pipe, result.step)
        norm = model.state_dict().get("norm.running_mean", torch.zeros(0))
        return Report(
            result.finished,
            result.step,
            first_step.number,
            result.metrics,
            flat(model.state_dict().values()),
            data.seen,
            norm.tolist(),
            killer.moments,
            trainer.sampler.shares,
            records,
            max(sizes, default=0),
        )


def _record_sizes(model: nn.Module, sizes: list[int]) -> None:
    """Without a hook, which no graph allows."""
    forward = model.forward

    def recorded(inputs: Tensor) -> Any:
        sizes.append(len(inputs))
        return forward(inputs)

    model.forward = recorded  # type: ignore[method-assign]


def _training_data(run: Run, world: RankWorld) -> Any:
    inputs, targets = run.data()
    if run.poison:
        inputs[run.poison[0]] = float("inf")
    data: Any = RecordingSource(inputs, targets, world.device)
    # As in a process that is no child of the tests' server.
    multiprocessing.set_start_method("fork", force=True)
    if run.noisy:
        data = DatasetSource(NoisyData(inputs, targets), world.device, workers=run.workers)
    data.seen = []
    return data


def _trainer(
    run: Run, world: RankWorld, model: nn.Module, data: Any, records: list[Any]
) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings: dict[str, Any] = {
        "global_batch": sum(run.shares),
        "shares": run.shares,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        "snapshot": Snapshot(run.snapshot, world.control),
        "total_epochs": run.epochs,
        "save_every_steps": run.save_every_steps,
        "recorders": [records.append],
        "precision": "fp32",
        **run.options,
    }
    eval_data = None
    if run.evaluates:
        eval_data = ResidentTensors(*make_data(19, run.dtype), world.device)
    return Trainer(world, model, optimizer, cross_entropy, data, eval_data, **settings)


class _FirstStep:
    """Called before each optimizer step: reports the first one, and does what the Run asks for."""

    def __init__(self, pipe: Connection, run: Run, trainer: Trainer) -> None:
        self.pipe, self.run, self.trainer = pipe, run, trainer
        self.number = -1

    def __call__(self, *args: object) -> None:
        step, rank = self.trainer.step, self.trainer.world.rank
        if self.number < 0:
            self.number = step
            tell(self.pipe, step)
        if self.run.usr2 == (rank, step):
            os.kill(os.getpid(), signal.SIGUSR2)
        if self.run.fill and rank == 0 and step == self.run.fill[1]:
            fill_disk(self.run.fill[0])


def run(folder: Path, tasks: tuple[int, ...], settings: Run, **options: Any) -> list[Report]:
    """The reports of all ranks."""
    with world(folder, tasks, train, settings, **options) as running:
        reports = []
        for rank in range(sum(tasks)):
            message = running.receive(rank)
            reports.append(message if isinstance(message, Report) else running.receive(rank))
        assert running.wait() == [0] * sum(tasks), running.all_logs()
    return reports


def reference(settings: Run, clip_norm: float | None = None) -> torch.Tensor:
    """The parameters after one process's plain training."""
    inputs, targets = settings.data()
    model = make_model(settings.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for epoch in range(settings.epochs):
        sampler = BalancedSampler(settings.samples, [sum(settings.shares)], 0)
        sampler.set_epoch(epoch)
        for order in sampler:
            optimizer.zero_grad()
            cross_entropy(model(inputs[order]), targets[order]).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            scheduler.step()
    return flat(model.parameters())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()
