"""Adaptive shares: what they cost equal cards, and how they follow a card that becomes slower.

    torchrun --nproc-per-node 2 benchmarks/adaptive.py
    # on CPUs (gloo):
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/adaptive.py --batch-size 32 --steps 150

After a third of the steps the last rank runs each part of the network twice. The rates are those of
the last third, in one run, beside those of the equal shares and of the best fixed ones.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_slurm.balance import apportion, equal_shares
from ddp_slurm.examples.cifar10 import MEAN, STD
from ddp_slurm.examples.models import resnet18, small_resnet, to_channels_last
from ddp_slurm.training import ResidentImages, Trainer, World, init_distributed
from ddp_slurm.training.adaptive import follow

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--batch-size", type=int, default=1024, help="a rank, on average")
parser.add_argument("--steps", type=int, default=450)
parser.add_argument("--rounds", type=int, default=2)

slowed: dict[str, Any] = {"from_step": -1, "trainer": None}
"""Of this rank: the step from which on each part runs twice; never below 0."""


class SometimesTwice(nn.Module):
    """The inner module, and from a step on the mean of two equal passes: twice the work."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.inner(images)
        trainer = slowed["trainer"]
        is_slow = trainer is not None and 0 <= slowed["from_step"] <= trainer.step
        return (outputs + self.inner(images)) / 2 if is_slow else outputs


def records_of(
    world: World, batch: int, steps: int, slow_from: int, shares: Sequence[int] | None
) -> list[dict[str, Any]]:
    """One training's reports, on rank 0; ``shares`` None adapts."""
    gpu = world.device.type == "cuda"
    samples = min(batch * steps, 50_000 // batch * batch)
    images = torch.randint(0, 256, (samples, 32, 32, 3), dtype=torch.uint8)
    labels = torch.randint(0, 10, (samples,))
    data = ResidentImages(images, labels, world.device, mean=MEAN, std=STD, augment=True)
    torch.manual_seed(0)
    model = resnet18() if gpu else small_resnet()
    model.stem = SometimesTwice(model.stem)
    model.stages = nn.Sequential(*(SometimesTwice(stage) for stage in model.stages))
    model = to_channels_last(model).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found: list[dict[str, Any]] = []
    slowed.update(trainer=None)
    trainer = Trainer(
        world,
        model,
        optimizer,
        cross_entropy,
        data,
        global_batch=batch,
        shares=shares,
        adapt_shares=shares is None,
        total_epochs=-(-steps * batch // samples),
        recorders=[found.append],
        log_every_steps=10,
        graphs="off",  # a graph would not see that the work has changed
        quiet=shares is not None,
    )
    is_last = world.rank == world.world_size - 1
    slowed["trainer"] = trainer
    slowed["from_step"] = slow_from if is_last else -1
    trainer.train()
    return [record for record in found if record["kind"] == "train"]


def rate(records: list[dict[str, Any]]) -> float:
    """Images a second in the last third."""
    rates = [record["images_per_second"] for record in records]
    return statistics.median(rates[-len(rates) // 3 :]) if rates else 0.0


def main() -> None:
    options = parser.parse_args()
    with init_distributed() as world:
        ranks = world.world_size
        batch = options.batch_size * ranks
        equal = equal_shares(batch, ranks)
        best = apportion(batch, [2] * (ranks - 1) + [1])
        slow_from = options.steps // 3
        found: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for name, start, shares in (
                ("equal cards, fixed", -1, equal),
                ("equal cards, adaptive", -1, None),
                ("one slower, equal", slow_from, equal),
                ("one slower, best fixed", slow_from, best),
                ("one slower, adaptive", slow_from, None),
            ):
                records = records_of(world, batch, options.steps, start, shares)
                found.setdefault(name, []).append(rate(records))
        if world.rank == 0:
            report({name: statistics.median(rates) for name, rates in found.items()})
            changes = [record for record in records if record["shares"] != records[0]["shares"]]
            first = changes[0]["step"] - slow_from if changes else 0
            print(
                f"shares {records[0]['shares']} -> {records[-1]['shares']}; the first report with "
                f"new ones came {first} steps after the card became slower (a re-plan every "
                f"{follow.EVERY})"
            )


def report(rates: dict[str, float]) -> None:
    for name, images in rates.items():
        print(f"{name}: {images:,.0f} images/s")
    cost = rates["equal cards, adaptive"] / rates["equal cards, fixed"]
    kept = rates["one slower, adaptive"] / rates["one slower, best fixed"]
    print(f"equal cards: adaptive / fixed {cost:.3f}")
    print(
        f"one slower: adaptive / best fixed {kept:.3f}, and / equal shares "
        f"{rates['one slower, adaptive'] / rates['one slower, equal']:.3f}"
    )


if __name__ == "__main__":
    main()
