"""What the ranks of the test worlds run to train. Imported by the server they are forked from, so
it stays light."""

import contextlib
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_slurm.exchange import Link
from ddp_slurm.training import (
    BalancedSampler,
    BatchNormStatistics,
    Snapshot,
    SnapshotError,
    Trainer,
    init_distributed,
    loss_weight,
    no_sample_loss,
)
from ddp_slurm.training.data import ResidentTensors
from ddp_slurm.training.measure import shares
from ddp_slurm.training.measure.links import measure_links, rings_of
from ddp_slurm.training.process_group.stop_vote import StopVote
from ddp_slurm.training.trainer.evaluation import evaluate
from ddp_slurm.training.trainer.precision import Precision
from ddp_slurm.training.uneven import calibrate, gradients
from ddp_slurm.training.uneven.weighted_loss import WeightedLoss

from .worlds import tell

FEATURES, CLASSES = 6, 4


def make_data(samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    # Sorted by class, with other scales: samples far from alike, so a wrong weight shows.
    targets = torch.arange(samples) * CLASSES // max(samples, 1)
    return inputs * (1 + targets[:, None]), targets


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@dataclass(frozen=True)
class Case:
    """One training to be compared with a single process."""

    samples: int
    shares: tuple[int, ...]
    steps: int
    micro_batch: int = 10**9
    accumulate: int = 1
    clip_norm: float | None = None
    dtype: torch.dtype = torch.float64
    weighted: bool = True
    lr: float = 0.1
    momentum: float = 0.9


@dataclass
class Outcome:
    """Per optimizer step the loss of all its samples and the gradient after clipping; and the
    parameters at the end."""

    losses: list[float]
    gradients: Tensor
    parameters: Tensor


def train_alone(case: Case) -> Outcome:
    """The reference: one process, no DDP, whole batches, and of this package the order alone."""
    inputs, targets = make_data(case.samples, case.dtype)
    model = make_model(case.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=case.momentum)
    losses, gradients = [], []
    for order in _windows(case):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[order]), targets[order])
        loss.backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        losses.append(loss.item())
        gradients.append(flat(p.grad for p in model.parameters()))
        optimizer.step()
    return Outcome(losses, torch.stack(gradients), flat(model.parameters()))


def _windows(case: Case) -> list[Tensor]:
    """The samples of each optimizer step: ``accumulate`` global batches, fewer at the end."""
    windows: list[Tensor] = []
    epoch = 0
    while len(windows) < case.steps:
        sampler = BalancedSampler(case.samples, case.shares, 0, seed=3)
        sampler.set_epoch(epoch)
        windows += sampler.order().split(sum(case.shares) * case.accumulate)
        epoch += 1
    return windows[: case.steps]


def train_in_parts(
    case: Case,
    rank: int,
    group: dist.ProcessGroup | None = None,
    wrap: Callable[[nn.Module, torch.optim.Optimizer], nn.Module] | None = None,
) -> Outcome:
    """Somebody's own loop over DDP with the sampler, the loss weight and ``no_sync``."""
    inputs, targets = make_data(case.samples, case.dtype)
    model = make_model(case.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=case.momentum)
    ddp: Any = (
        wrap(model, optimizer)
        if wrap
        else nn.parallel.DistributedDataParallel(model, process_group=group)
    )
    sampler = BalancedSampler(case.samples, case.shares, rank, seed=3)
    losses: list[float] = []
    gradients: list[Tensor] = []
    epoch = 0
    while len(losses) < case.steps:
        sampler.set_epoch(epoch)
        batches = list(sampler)
        for first in range(0, len(batches), case.accumulate):
            if len(losses) == case.steps:
                break
            window = range(first, min(first + case.accumulate, len(batches)))
            total = sum(sampler.global_samples(step) for step in window)
            chunks = [
                c
                for step in window
                for c in torch.tensor(batches[step], dtype=torch.int64).split(case.micro_batch)
            ]
            optimizer.zero_grad()
            loss_sum = torch.zeros(1, dtype=torch.float64)
            for i, chunk in enumerate(chunks):
                with contextlib.nullcontext() if i + 1 == len(chunks) else ddp.no_sync():
                    if len(chunk) == 0:
                        no_sample_loss(ddp).backward()
                        continue
                    loss = cross_entropy(ddp(inputs[chunk]), targets[chunk])
                    loss_sum += loss.detach().double() * len(chunk)
                    weight = (
                        loss_weight(len(chunk), total, len(case.shares))
                        if case.weighted
                        else 1 / len(chunks)
                    )
                    (loss * weight).backward()
            if case.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
            dist.all_reduce(loss_sum, group=group)
            losses.append(loss_sum.item() / total)
            gradients.append(_gradient(model))
            optimizer.step()
        epoch += 1
    return Outcome(losses, torch.stack(gradients), flat(model.parameters()))


def _gradient(model: nn.Module) -> Tensor:
    """Zeros where a rank without samples has none."""
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def compare(pipe: Connection, case: Case) -> Outcome:
    with init_distributed() as world:
        return train_in_parts(case, world.rank)


def serve_cases(pipe: Connection) -> None:
    """Answer cases from the pipe until None comes. A case with fewer shares than ranks uses the
    first ranks only."""
    with init_distributed() as world:
        groups = {
            size: dist.new_group(list(range(size))) for size in range(1, world.world_size + 1)
        }
        while (case := pipe.recv()) is not None:
            size = len(case.shares)
            tell(
                pipe, train_in_parts(case, world.rank, groups[size]) if world.rank < size else None
            )


def load_on_every_rank(pipe: Connection, folder: Path, backend: str = "gloo") -> tuple[str, Any]:
    """Every rank has a folder of its own, as on machines without a shared disk."""
    with init_distributed() as world:
        dist.get_backend = lambda: backend
        if backend != "gloo":  # as NCCL does with what is not on a GPU
            broadcast = dist.broadcast

            def refuses_the_default_group(
                tensor: Tensor, src: int, group: dist.ProcessGroup | None = None
            ) -> None:
                assert group is not None
                broadcast(tensor, src, group)

            dist.broadcast = refuses_the_default_group
        try:
            return "state", Snapshot(folder / f"rank{world.rank}" / "snapshot.pt").load()
        except SnapshotError as error:
            return "fault", str(error)


def averaged_statistics(
    pipe: Connection, counts: list[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """BatchNorm statistics, averaged and own: rank r has mean r, variance 10 r and r batches."""
    with init_distributed() as world:
        kind = nn.BatchNorm1d if counts[-1] else nn.InstanceNorm1d
        model = nn.Sequential(
            kind(3, track_running_stats=True),
            nn.Linear(3, 1),
            nn.BatchNorm1d(1, track_running_stats=False),
        )
        norm = model[0]
        norm.running_mean.fill_(world.rank)
        norm.running_var.fill_(10 * world.rank)
        norm.num_batches_tracked.fill_(world.rank)
        statistics = BatchNormStatistics(model)
        statistics.count(counts[world.rank])
        averaged = statistics.averaged()
        own = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        statistics.synchronize()
        assert torch.equal(norm.running_mean, averaged["0.running_mean"])
        assert statistics.samples == 0
        return averaged, own


def first_buffers(pipe: Connection, is_old_torch: bool) -> list[float]:
    """The buffers after ``wrap_model``, which differ by rank before."""
    # before 2.13, whose option also skips the first synchronisation; it still exists as an alias
    if is_old_torch:
        gradients.inspect = SimpleNamespace(
            signature=lambda function: SimpleNamespace(parameters={})
        )
    with init_distributed() as world:
        model = nn.BatchNorm1d(2)
        model.running_mean.fill_(world.rank + 1)
        gradients.wrap_model(model, world.device)
        return model.running_mean.tolist()


def evaluated(pipe: Connection, samples: int, shares: list[int]) -> dict[str, float]:
    with init_distributed() as world:
        source = ResidentTensors(*make_data(samples, torch.float64), world.device)
        model = make_model(torch.float64)
        return evaluate(
            model,
            source,
            WeightedLoss(cross_entropy),
            rank=world.rank,
            shares=shares,
            batch_size=4,
            precision=Precision("fp32", "cpu"),
        )


class NoisyData(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A data set whose transform draws from the global generator."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + torch.randn(FEATURES, dtype=self.inputs.dtype), self.targets[
            index
        ]


class SleepyModel(nn.Module):
    """Takes so many seconds a sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(FEATURES, CLASSES), seconds

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds * len(inputs))
        outputs: Tensor = self.layer(inputs)
        return outputs


def measured(
    pipe: Connection,
    seconds_per_sample: list[float],
    global_batch: int,
    costs: list[tuple[float, float]] | None = None,
) -> list[int]:
    """The shares that the Trainer finds; by ``costs``, (fixed, a sample), the ranks' steps would
    take so long."""
    with init_distributed() as world:
        if costs is not None:
            alpha, beta = costs[world.rank]
            calibrate.seconds_of_step = lambda step, work, size, **more: alpha + beta * size
        model = SleepyModel(seconds_per_sample[world.rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = flat(model.parameters())
        trainer = Trainer(
            world,
            model,
            optimizer,
            cross_entropy,
            ResidentTensors(*make_data(40, torch.float32), world.device),
            global_batch=global_batch,
            total_epochs=1,
        )
        assert torch.equal(flat(model.parameters()), before)  # measuring trains nothing
        return trainer.sampler.shares


def example(pipe: Connection, script: Path, arguments: list[str]) -> None:
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


class SleepyOptimizer(torch.optim.SGD):
    """Its update takes 50 ms."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(0.05)
        super().step(closure)


def voted(pipe: Connection, step_seconds: float, asks_from: int) -> tuple[int, int]:
    """The step after which this rank stops, which rank 1 asks for; the number of votes."""
    with init_distributed() as world:
        vote, votes = StopVote(world.control), 0
        for step in range(1000):
            if vote.result():
                return step, votes
            vote.cast(world.rank == 1 and step >= asks_from)
            votes += vote._work is not None
            time.sleep(step_seconds * (1 + world.rank))
    raise AssertionError("no rank has stopped")


def measured_card(pipe: Connection) -> object:
    """The status with which the Trainer ends the process in a job of ddp-slurm measure."""
    with init_distributed() as world:
        model = SleepyModel(0.001)
        data = ResidentTensors(*make_data(40, torch.float32), world.device)
        optimizer = SleepyOptimizer(model.parameters(), lr=0.1)
        settings = {"global_batch": 8, "total_epochs": 1, "micro_batch": 16}
        try:
            Trainer(world, model, optimizer, cross_entropy, data, **settings)
        except SystemExit as end:
            return end.code
    raise AssertionError("the Trainer came back")


def measured_links(pipe: Connection) -> Any:
    with init_distributed() as world:
        rings = rings_of([fact.node_rank for fact in world.ranks])
        return rings, measure_links(rings, world.device, world.control)


def trained_with_slow_network(pipe: Connection) -> None:
    """An epoch of the Trainer on two nodes, whose link was measured to have a kilobyte a second."""
    shares.measure_ring = lambda *args: Link(1000.0, 0.0)
    with init_distributed() as world:
        for fact in world.ranks:
            object.__setattr__(fact, "node_name", f"vm{fact.rank}")
        model = SleepyModel(0.002 if world.rank == 0 else 0.001)
        data = ResidentTensors(*make_data(40, torch.float32), world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"global_batch": 8, "total_epochs": 1, "log_every_steps": 1}
        Trainer(world, model, optimizer, cross_entropy, data, **settings).train()
