"""Models, data and rates that the benchmarks of uneven cards share."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_slurm.examples.models import resnet18, small_resnet, to_channels_last
from ddp_slurm.training import ResidentTensors, Trainer, World
from ddp_slurm.training.data import Batch, Span
from ddp_slurm.training.exchange import broadcast_value
from ddp_slurm.training.graphs.compute import as_graph
from ddp_slurm.training.trainer.forward_backward import ForwardBackward
from ddp_slurm.training.trainer.loss_sum import LossSum
from ddp_slurm.training.trainer.precision import choose_precision
from ddp_slurm.training.uneven.calibrate import wait_for_device
from ddp_slurm.training.uneven.weighted_loss import WeightedLoss

CLASSES = 10
WORDS = 512
NAMES = ("resnet18", "vit", "gpt")


class Repeated(nn.Module):
    """The mean of k equal passes: k times the work forward and backward, and the same gradient.

    Of each block, not of the whole network: its gradient is ready when the block is done, as on a
    slow card.
    """

    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, inputs: Tensor) -> Tensor:
        total = self.inner(inputs)
        for _ in range(self.times - 1):
            total = total + self.inner(inputs)
        return total if self.times == 1 else total / self.times


class CausalLayer(nn.TransformerEncoderLayer):
    """Each token sees itself and those before it."""

    def forward(self, src: Tensor, *more: Any, **options: Any) -> Tensor:
        size = src.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size, device=src.device)
        return super().forward(src, src_mask=mask, is_causal=True)


class Transformer(nn.Module):
    """Tokens of ``width`` numbers through blocks; of the mean of all, or of each, the classes."""

    def __init__(self, first: nn.Module, tokens: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.first = first
        self.places = nn.Parameter(0.02 * torch.randn(tokens, width))
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        layer = CausalLayer if outputs == WORDS else nn.TransformerEncoderLayer
        heads = max(1, width // 64)
        blocks = [layer(width, heads, 4 * width, **options) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.blocks(self.first(inputs) + self.places))
        is_text = hidden.shape[-1] == WORDS
        return hidden if is_text else hidden.mean(dim=1)


class Patches(nn.Module):
    """(n, 3, 32, 32) to (n, 64, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, width, 4, stride=4)

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.inner(images).flatten(2).transpose(1, 2)
        return patches


class Repeating(ResidentTensors):
    """As many samples as a training needs, of which all after the first ones are these again."""

    def __init__(self, inputs: Tensor, targets: Tensor, device: torch.device, samples: int) -> None:
        super().__init__(inputs, targets, device)
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def batches(self, order: Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        return super().batches(order % len(self.targets), spans, epoch)


@dataclass(frozen=True)
class Workload:
    """A model, small on CPUs."""

    name: str
    gpu: bool

    def model(self, times: int = 1) -> nn.Module:
        """The same parameters on every rank; each block runs ``times`` times."""
        torch.manual_seed(0)
        width, depth = (384, 8) if self.gpu else (32, 2)
        if self.name == "resnet18":
            network = to_channels_last(resnet18() if self.gpu else small_resnet())
            assert isinstance(network.stages, nn.Sequential)
            assert isinstance(network.stem, nn.Module)
            network.stem = Repeated(network.stem, times)
            network.stages = nn.Sequential(*(Repeated(part, times) for part in network.stages))
            return network
        if self.name == "vit":
            network = Transformer(Patches(width), 64, width, depth, CLASSES)
        else:
            network = Transformer(nn.Embedding(WORDS, width), 128, width, depth, WORDS)
        network.blocks = nn.Sequential(*(Repeated(block, times) for block in network.blocks))
        return network

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.name == "resnet18":
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    def data(self, batch: int, device: torch.device, steps: int = 1) -> Repeating:
        """The same on every rank."""
        generator = torch.Generator().manual_seed(1)
        if self.name == "gpt":
            text = torch.randint(0, WORDS, (batch, 129), generator=generator)
            return Repeating(text[:, :-1], text[:, 1:].contiguous(), device, steps * batch)
        images = torch.randn(batch, 3, 32, 32, generator=generator)
        labels = torch.randint(0, CLASSES, (batch,), generator=generator)
        return Repeating(images, labels, device, steps * batch)

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over samples: all have equally many tokens."""
        return cross_entropy(outputs.flatten(0, -2), targets.flatten())


def rate_alone(
    world: World, work: Workload, model: nn.Module, share: int, most: int, steps: int
) -> float:
    """Images a second of this rank's card by itself, in passes of at most ``most`` samples; 0 for
    no share. All ranks call it: they work at once, as in training."""
    precision = choose_precision("auto", world.ranks)
    optimizer = work.optimizer(model)
    data = work.data(max(1, share), world.device)
    inputs, targets = next(data.batches(torch.arange(max(1, share)), [(0, share)], epoch=0))
    dist.barrier(group=world.control)
    started = 0.0
    for index in range(steps + 3 if share else 0):
        if index == 3:
            wait_for_device(world.device)
            started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for part in torch.arange(share).split(-(-share // -(-share // most))):
            chosen = slice(int(part[0]), int(part[-1]) + 1)
            with precision.autocast():
                loss = work.loss(model(inputs[chosen]), targets[chosen]) * (len(part) / share)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    wait_for_device(world.device)
    return steps * share / (time.perf_counter() - started) if share else 0.0


def rate_as_graph(world: World, work: Workload, model: nn.Module, share: int, steps: int) -> float:
    """The same at once, with forward and backward as a CUDA graph; 0 where that is impossible."""
    if world.device.type != "cuda":
        return 0.0
    precision = choose_precision("auto", world.ranks)
    optimizer = work.optimizer(model)
    order = torch.arange(max(1, share))
    inputs, targets = next(work.data(max(1, share), world.device).batches(order, [(0, share)], 0))
    loss = WeightedLoss(work.loss, None)
    forward_backward = ForwardBackward(model, loss, precision, LossSum(world.device))
    run = as_graph(forward_backward, inputs, targets) if share else None
    wait_for_device(world.device)
    dist.barrier(group=world.control)
    started = time.perf_counter()
    if run is None:
        return 0.0
    for _ in range(steps):
        run()
        optimizer.step()
    wait_for_device(world.device)
    return steps * share / (time.perf_counter() - started)


def trainer_of(
    world: World, work: Workload, model: nn.Module, batch: int, steps: int, **settings: Any
) -> Trainer:
    """A silent one, of so many steps with a global batch of ``batch`` samples."""
    options: dict[str, Any] = {"total_epochs": 1, "quiet": True, **settings}
    optimizer = options.pop("optimizer", None) or work.optimizer(model)
    data = work.data(batch, world.device, steps)
    return Trainer(world, model, optimizer, work.loss, data, global_batch=batch, **options)


def rate_of(world: World, trainer: Trainer) -> float:
    """Images a second of all ranks, in the second half of the steps; the training is run."""
    rates: list[float] = []
    trainer.records.add(lambda record: rates.append(float(record.get("images_per_second", 0.0))))
    trainer.train()
    late = rates[len(rates) // 2 :]
    return float(broadcast_value(statistics.median(late) if late else 0.0, world.control))
