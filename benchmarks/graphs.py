"""Steps as CUDA graphs: the same gradient, the same loss curve, and how much faster they are.

    torchrun --nproc-per-node 1 benchmarks/graphs.py
    torchrun --nproc-per-node 2 benchmarks/graphs.py
    # also a model that torch.compile has compiled: two minutes more
    torchrun --nproc-per-node 1 benchmarks/graphs.py --sizes 512 --compiled 512

It needs GPUs; about a minute. Exits non-zero if a comparison with the same training without graphs
fails. ResNet-18 on CIFAR-10 shapes, bf16; the sizes are samples a rank.
"""

import argparse
import functools
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_slurm.balance import apportion
from ddp_slurm.examples.cifar10 import MEAN, STD
from ddp_slurm.examples.models import resnet18, to_channels_last
from ddp_slurm.training import (
    ResidentImages,
    ResidentTensors,
    Snapshot,
    Trainer,
    World,
    init_distributed,
)
from ddp_slurm.training.exchange import broadcast_value

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--sizes", default="128,512,1024,2048")
parser.add_argument("--steps", type=int, default=150, help="of each measurement")
parser.add_argument("--compiled", type=int, help="a size at which a compiled model is timed too")
parser.add_argument("--rounds", type=int, default=1)

failures: list[str] = []


class Waiting(nn.Module):
    """Does in its forward what no capture allows."""

    def __init__(self, inner: nn.Module, wait: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner, self.wait = inner, wait

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        self.wait(outputs)
        return outputs


def network() -> nn.Module:
    """With BatchNorm, whose statistics a graph must advance by one step at a time."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )


def trained(
    world: World, model: nn.Module, dtype: torch.dtype, graphs: str, **settings: Any
) -> Tensor:
    """Parameters and statistics after 45 steps with uneven shares and an incomplete batch."""
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(50 * 15 + 20) % 10
    inputs = torch.randn(len(labels), 3, 8, 8, generator=generator, dtype=torch.float64)
    data = ResidentTensors(inputs.to(dtype), labels, world.device)
    model = model.to(world.device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    shares = apportion(50, [rank + 1 for rank in range(world.world_size)])
    trainer = Trainer(
        world,
        model,
        optimizer,
        cross_entropy,
        data,
        global_batch=50,
        shares=shares,
        quiet=True,
        graphs=graphs,
        **{"total_epochs": 3, **settings},
    )
    trainer.train()
    world.average()
    trainer.batchnorm.synchronize()
    values = [tensor.double().flatten() for tensor in model.state_dict().values()]
    return torch.cat(values)


def compare(world: World, name: str, tolerance: float, **options: Any) -> None:
    without = trained(world, network(), graphs="off", **options)
    with_graphs = trained(world, network(), graphs="on", **options)
    report(world, name, (with_graphs - without).norm() / without.norm(), tolerance)


def report(world: World, name: str, error: Any, tolerance: float) -> None:
    good = bool(error <= tolerance)
    if not good:
        failures.append(name)
    if world.rank == 0:
        print(f"{'ok' if good else 'FAILED':6} {name}: {float(error):.1e}", flush=True)


def check_exactness(world: World) -> None:
    fp64, fp32 = torch.float64, torch.float32
    compare(world, "fp64", 1e-9, dtype=fp64, precision="fp32")
    compare(
        world,
        "accumulated, clipped",
        1e-9,
        dtype=fp64,
        precision="fp32",
        micro_batch=7,
        clip_norm=0.1,
    )
    compare(world, "bf16", 2e-2, dtype=fp32, precision="bf16")
    compare(world, "fp16 with its loss scaler", 2e-2, dtype=fp32, precision="fp16")
    with tempfile.TemporaryDirectory() as folder:
        path = broadcast_value(folder, world.control)
        snapshot = Snapshot(Path(path) / "s.pt", world.control)
        whole = trained(world, network(), fp64, "off", precision="fp32")
        trained(world, network(), fp64, "on", precision="fp32", snapshot=snapshot, total_epochs=1)
        again = trained(world, network(), fp64, "on", precision="fp32", snapshot=snapshot)
        report(world, "from a snapshot", (again - whole).norm() / whole.norm(), 1e-9)


def check_fallback(world: World) -> None:
    """Models that wait: the first is found by torch's watch, the second breaks the capture."""
    waits = {"item": lambda outputs: outputs.sum().item(), "synchronize": _synchronize}
    for name, wait in waits.items():
        without = trained(world, network(), torch.float64, "off", precision="fp32")
        model = Waiting(network(), wait)
        found = trained(world, model, torch.float64, "on", precision="fp32")
        report(world, f"a model that waits: {name}", (found - without).norm(), 1e-7)
    # What a broken capture may leave behind: torch's generator, which dropout draws from.
    nn.functional.dropout(torch.ones(8, device=world.device)).sum().item()


def _synchronize(outputs: Tensor) -> None:
    torch.cuda.synchronize()


@functools.cache
def made_images(samples: int, device: torch.device) -> ResidentImages:
    """With something to learn: the label goes with the brightness of some pixels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (samples, 32, 32, 3), dtype=torch.uint8, generator=generator)
    brightness = images[:, :4, :4].float().mean(dim=(1, 2, 3))
    labels = brightness.argsort().argsort() * 10 // samples
    return ResidentImages(images, labels, device, mean=MEAN, std=STD, augment=True)


def images_a_second(
    world: World,
    size: int,
    steps: int,
    graphs: str,
    *,
    note: list[float] | None = None,
    compiled: bool = False,
) -> float:
    """Of all ranks, the start left out; the losses of the reports go to ``note``."""
    batch = size * world.world_size
    samples = min(50_000, batch * steps)
    data = made_images(samples, world.device)
    torch.manual_seed(0)
    model = to_channels_last(resnet18()).to(world.device)
    if compiled:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    rates: list[float] = []

    def recorder(record: dict[str, Any]) -> None:
        rates.append(record["images_per_second"])
        if note is not None:
            note.append(record["loss"])

    Trainer(
        world,
        model,
        optimizer,
        cross_entropy,
        data,
        global_batch=batch,
        total_epochs=max(1, steps * batch // samples),
        recorders=[recorder],
        log_every_steps=max(5, steps // 10),
        graphs=graphs,
        quiet=graphs != "auto",
    ).train()
    # Half of the reports: the others have the start in them, and the steps that are timed.
    rate = statistics.median(rates[len(rates) // 2 :]) if rates else 0.0
    return float(broadcast_value(rate, world.control))


def check_curve(world: World, steps: int) -> None:
    """The largest difference of the mean loss of a few steps, beside that of two equal runs."""
    curves: list[list[float]] = []
    for graphs in ("off", "off", "on"):
        curves.append([])
        images_a_second(world, 128, steps, graphs, note=curves[-1])
    if world.rank == 0:
        first, again, graphed = curves
        noise = max(abs(a - b) for a, b in zip(first, again, strict=True))
        error = max(abs(a - b) for a, b in zip(first, graphed, strict=True))
        print(
            f"loss from {first[0]:.4f} to {first[-1]:.4f}; two runs without graphs differ by up "
            f"to {noise:.1e}, with graphs by {error:.1e}",
            flush=True,
        )


def main() -> None:
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    with init_distributed() as world:
        if world.device.type != "cuda":
            parser.error("CUDA graphs need GPUs")
        check_exactness(world)
        check_fallback(world)
        torch.backends.cudnn.benchmark = True
        check_curve(world, arguments.steps)
        for size in map(int, arguments.sizes.split(",")):
            found: dict[str, list[float]] = {"off": [], "on": [], "auto": []}
            for _ in range(arguments.rounds):
                for graphs, rates in found.items():
                    rates.append(images_a_second(world, size, arguments.steps, graphs))
            if world.rank == 0:
                off, on, auto = (statistics.median(rates) for rates in found.values())
                print(
                    f"{size:5} a rank: {off:8,.0f} images/s without graphs, {on:8,.0f} with, "
                    f"{auto:8,.0f} auto: {on / off:.2f} and {auto / off:.2f} times",
                    flush=True,
                )
        if arguments.compiled:
            rates_of = {"off": 0.0, "on": 0.0}
            for graphs in rates_of:
                rates_of[graphs] = images_a_second(
                    world, arguments.compiled, 2 * arguments.steps, graphs, compiled=True
                )
            if world.rank == 0:
                print(
                    f"{arguments.compiled:5} a rank, compiled: {rates_of['off']:8,.0f} images/s "
                    f"without graphs, {rates_of['on']:8,.0f} with"
                )
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
