"""What local steps and PowerSGD cost in accuracy, without GPUs: one process plays all ranks.

    python -m benchmarks.links_simulation DATA.npz --ways exact,local:32,powersgd+rank=4 --seeds 3

A small ResNet learns CIFAR-10 at 8 x 8 pixels; a training takes some 10 s. A way may have settings
of its own: delay, outer_lr, outer_momentum, epochs, lr, start and end (the parts of the training
that take exact steps), rank and exact (of PowerSGD: its matrices, and the exact steps before it).
Everything is fp32: bf16 on the links is left out.
"""

import argparse
import copy
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from ddp_slurm.comm import Comm
from ddp_slurm.examples.cifar10 import load_cifar10
from ddp_slurm.examples.models import CifarResNet
from ddp_slurm.training.links.local_steps import LocalConfig

Data = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Way:
    """``--comm``, and settings for it."""

    comm: Comm
    settings: dict[str, float]

    @classmethod
    def read(cls, text: str) -> "Way":
        comm, *settings = text.split("+")
        pairs = (setting.split("=") for setting in settings)
        return cls(Comm.read(comm), {name: float(number) for name, number in pairs})

    def local(self) -> LocalConfig:
        names = {"outer_lr": float, "outer_momentum": float, "delay": int}
        chosen: dict[str, Any] = {
            name: kind(self.settings[name]) for name, kind in names.items() if name in self.settings
        }
        return LocalConfig(self.comm.steps, **chosen)


class Ranks:
    """Models and optimizers of all ranks, which have equal shares."""

    def __init__(self, count: int, lr: float) -> None:
        model = CifarResNet((1, 1), 16)
        self.models: list[nn.Module] = [copy.deepcopy(model) for _ in range(count)]
        self.optimizers = [
            torch.optim.SGD(m.parameters(), lr, 0.9, weight_decay=5e-4, nesterov=True)
            for m in self.models
        ]

    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        parts = zip(inputs.tensor_split(self.count), targets.tensor_split(self.count), strict=True)
        for model, (own_inputs, own_targets) in zip(self.models, parts, strict=True):
            model.zero_grad()
            cross_entropy(model(own_inputs), own_targets).backward()  # type: ignore[no-untyped-call]

    @property
    def count(self) -> int:
        return len(self.models)

    def gradients(self) -> Iterator[list[Tensor]]:
        """Of one parameter after another, those of all ranks."""
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            yield [p.grad for p in parameters if p.grad is not None]

    def step(self, lr: float) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()

    def points(self) -> Tensor:
        return torch.stack(
            [nn.utils.parameters_to_vector(m.parameters()).detach() for m in self.models]
        )

    def move(self, points: Tensor) -> None:
        for model, point in zip(self.models, points, strict=True):
            nn.utils.vector_to_parameters(point.clone(), model.parameters())

    def average_states(self) -> None:
        """Optimizers' momentum and BatchNorm's statistics: as if there had been one rank."""
        own = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            momentum = [value for state in optimizer.state.values() for value in state.values()]
            own.append(momentum + [b for b in model.buffers() if b.is_floating_point()])
        for alike in zip(*own, strict=True):
            mean = torch.stack(alike).mean(dim=0)
            for tensor in alike:
                tensor.copy_(mean)


class LocalAverage:
    """The algorithm of ``ddp_slurm.training.links.local_steps``."""

    def __init__(self, ranks: Ranks, config: LocalConfig) -> None:
        self.ranks, self.config = ranks, config
        self.anchor = ranks.points()[0]
        self.velocity = torch.zeros_like(self.anchor)
        self.sent: Tensor | None = None
        self.steps = 0

    def after_step(self) -> None:
        self.steps += 1
        if self.steps >= self.config.steps_of_delay:
            self.apply()
        if self.steps == self.config.steps:
            self.send()
            if self.config.steps_of_delay == 0:
                self.apply()

    def send(self) -> None:
        self.sent, self.steps = self.ranks.points(), 0

    def apply(self) -> None:
        if self.sent is None:
            return
        change = self.sent.mean(dim=0) - self.anchor
        momentum = self.config.momentum
        self.velocity = momentum * self.velocity + change
        self.anchor = self.anchor + self.config.outer_lr * (change + momentum * self.velocity)
        self.ranks.move(self.ranks.points() + self.anchor - self.sent)
        self.sent = None

    def settle(self) -> None:
        """All ranks at one point."""
        self.apply()
        if self.steps:
            self.send()
            self.apply()


class PowerSgd:
    """Matrices of low rank, with error feedback and a warm start.

    Source: Vogels et al. 2019, arXiv:1905.13727.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.errors: dict[int, list[Tensor]] = {}
        self.right: dict[int, Tensor] = {}

    def mean(self, index: int, gradients: list[Tensor]) -> Tensor:
        shape = gradients[0].shape
        rows, columns = shape[0], gradients[0].numel() // shape[0]
        if len(shape) < 2 or 2 * self.rank * (rows + columns) >= rows * columns:
            return torch.stack(gradients).mean(dim=0)
        zeros = [torch.zeros(rows, columns)] * len(gradients)
        errors = self.errors.get(index, zeros)
        matrices = [g.reshape(rows, columns) + e for g, e in zip(gradients, errors, strict=True)]
        mean = torch.stack(matrices).mean(dim=0)
        right = self.right.get(index, torch.randn(columns, self.rank))
        left = torch.linalg.qr(mean @ torch.linalg.qr(right)[0])[0]
        self.right[index] = mean.T @ left
        sent: Tensor = left @ self.right[index].T
        self.errors[index] = [matrix - sent for matrix in matrices]
        return sent.reshape(shape)


def train(way: Way, data: Data, seed: int, options: argparse.Namespace) -> tuple[float, float]:
    """Percent of the test images, and the loss on them."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = data
    chosen = way.settings
    peak, epochs = chosen.get("lr", options.lr), int(chosen.get("epochs", options.epochs))
    ranks = Ranks(options.ranks, peak)
    compressed = PowerSgd(int(chosen.get("rank", 2))) if way.comm.kind == "powersgd" else None
    steps = epochs * -(-len(images) // options.global_batch_size)
    first, last = chosen.get("start", 0.0) * steps, (1 - chosen.get("end", 0.0)) * steps
    average: LocalAverage | None = None
    for step, batch in enumerate(_batches(len(images), epochs, options.global_batch_size)):
        is_local = way.comm.kind == "local" and first <= step < last
        if is_local and average is None:
            average = LocalAverage(ranks, way.local())
        if not is_local and average is not None:
            average.settle()
            ranks.average_states()
            average = None
        ranks.backward(_augmented(images[batch]), labels[batch])
        if average is None:
            _exchange(ranks, compressed if step >= chosen.get("exact", 10) else None)
        done = step / steps
        ranks.step(peak * min(0.1 + 4.5 * done, 1.25 * (1 - done)))
        if average is not None:
            average.after_step()
    if average is not None:
        average.settle()
    ranks.average_states()
    return _test(ranks.models[0], test_images, test_labels)


def _batches(images: int, epochs: int, size: int) -> Iterator[Tensor]:
    for _ in range(epochs):
        yield from torch.split(torch.randperm(images), size)


def _exchange(ranks: Ranks, compressed: PowerSgd | None) -> None:
    for index, gradients in enumerate(ranks.gradients()):
        mean = torch.stack(gradients).mean(dim=0)
        if compressed is not None:
            mean = compressed.mean(index, gradients)
        for gradient in gradients:
            gradient.copy_(mean)


def _augmented(images: Tensor) -> Tensor:
    is_flipped = torch.rand(len(images), 1, 1, 1) < 0.5
    shift = torch.randint(-1, 2, (2,)).tolist()
    return torch.where(is_flipped, images.flip(3), images).roll(shift, (2, 3))


@torch.no_grad()
def _test(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    model.eval()
    outputs = torch.cat([model(part) for part in torch.split(images, 1000)])
    part = (outputs.argmax(dim=1) == labels).float().mean().item()
    return 100 * part, cross_entropy(outputs, labels).item()


def small_images(path: str, limit: int) -> Data:
    images, labels, test_images, test_labels = load_cifar10(path)

    def small(images: Tensor) -> Tensor:
        return (avg_pool2d(images.permute(0, 3, 1, 2).float() / 255, 4) - 0.47) / 0.23

    return small(images[:limit]), labels[:limit], small(test_images), test_labels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="an .npz archive or the folder of torchvision's CIFAR10")
    parser.add_argument("--ways", default="exact,powersgd,local:8,local:16,local:32")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--images", type=int, default=25_000)
    parser.add_argument("--global-batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.4, help="at its highest")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = small_images(options.data, options.images)
    for text in options.ways.split(","):
        found = [train(Way.read(text), data, seed, options) for seed in range(options.seeds)]
        accuracies, losses = zip(*found, strict=True)
        spread = statistics.stdev(accuracies) if len(found) > 1 else 0.0
        mean = statistics.fmean(accuracies)
        print(
            f"{text:40} {mean:.2f} % ± {spread:.2f}  loss {statistics.fmean(losses):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
