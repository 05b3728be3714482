"""The training's exactness on real cards over NCCL, with uneven shares.

Exits non-zero if a check fails.

    torchrun --nproc-per-node 2 benchmarks/gpu_checks.py
    torchrun --nproc-per-node 4 benchmarks/gpu_checks.py
    # must name both ranks of one GPU:
    CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 2 benchmarks/gpu_checks.py

Each check trains 20 steps in the Trainer and compares the parameters with those of one process
that takes the whole batch on one card. It runs on CPUs (gloo) too, without SyncBatchNorm.
"""

import copy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_slurm.balance import apportion
from ddp_slurm.training import (
    BalancedSampler,
    Snapshot,
    Trainer,
    World,
    init_distributed,
    loss_weight,
)
from ddp_slurm.training.data import ResidentTensors
from ddp_slurm.training.trainer.precision import Precision
from ddp_slurm.training.uneven.gradients import wrap_model

STEPS, GLOBAL_BATCH, CLIP_NORM = 20, 101, 0.5


def network(norm: bool) -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    layers += [nn.BatchNorm2d(16)] if norm else []
    layers += [
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    ]
    return nn.Sequential(*layers)


def images(samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(samples) * 10 // samples
    inputs = torch.randn(samples, 3, 16, 16, generator=generator, dtype=torch.float64) * (
        1 + labels[:, None, None, None]
    )
    return inputs.to(dtype), labels


def alone(
    world: World, model: nn.Module, samples: int, dtype: torch.dtype, precision: Precision
) -> Tensor:
    """The parameters after 20 steps of one process with the whole batch.

    Plain PyTorch, but for the order of the samples.
    """
    inputs, labels = (tensor.to(world.device) for tensor in images(samples, dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = precision.grad_scaler()
    step = epoch = 0
    while step < STEPS:
        sampler = BalancedSampler(samples, [GLOBAL_BATCH], 0)
        sampler.set_epoch(epoch)
        for order in sampler.order().to(world.device).split(GLOBAL_BATCH)[: STEPS - step]:
            optimizer.zero_grad()
            with precision.autocast():
                loss = cross_entropy(model(inputs[order]), labels[order])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            scaler.step(optimizer)
            scaler.update()
            step += 1
        epoch += 1
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def together(
    world: World,
    model: nn.Module,
    shares: Sequence[int],
    samples: int,
    dtype: torch.dtype,
    precision: str,
    micro_batch: int | None,
    snapshot: Snapshot | None = None,
    epochs: int | None = None,
) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    Trainer(
        world,
        model,
        optimizer,
        cross_entropy,
        ResidentTensors(*images(samples, dtype), world.device),
        global_batch=GLOBAL_BATCH,
        shares=shares,
        total_epochs=epochs or STEPS // -(-samples // GLOBAL_BATCH),
        precision=precision,
        clip_norm=CLIP_NORM,
        micro_batch=micro_batch,
        snapshot=snapshot,
        quiet=True,
    ).train()
    return flat(model)


def naive(world: World, model: nn.Module, shares: Sequence[int], samples: int) -> Tensor:
    """The same with DDP's own mean over ranks, which is wrong on uneven shares."""
    inputs, labels = (tensor.to(world.device) for tensor in images(samples, torch.float32))
    ddp = wrap_model(model, world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    sampler = BalancedSampler(samples, shares, world.rank, drop_last=True)
    for _ in range(STEPS // max(1, len(sampler))):
        for order in sampler:
            optimizer.zero_grad()
            cross_entropy(ddp(inputs[order]), labels[order]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
    return flat(model)


def same_on_all_ranks(world: World, values: Tensor) -> bool:
    everyone = [torch.empty_like(values) for _ in range(world.world_size)]
    dist.all_gather(everyone, values)
    return all(torch.equal(values, other) for other in everyone)


class Checks:
    def __init__(self, world: World) -> None:
        self.world, self.failed = world, 0

    def report(self, name: str, good: bool, figure: str) -> None:
        votes = torch.tensor([int(not good)])
        dist.all_reduce(votes, group=self.world.control)
        self.failed += int(votes.item() > 0)
        if self.world.rank == 0:
            print(f"{'ok    ' if votes.item() == 0 else 'FAILED'}  {name}: {figure}", flush=True)

    def close_to(self, name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
        error = ((found - expected).norm() / expected.norm()).item()
        same = same_on_all_ranks(self.world, found)
        figure = (
            f"relative error {error:.1e} (at most {tolerance:.0e}), same bits on all ranks: {same}"
        )
        self.report(name, error < tolerance and same, figure)


def main() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    with init_distributed() as world:
        checks, device = Checks(world), world.device
        weights = [5, 72, 24, 50, 9, 31, 2, 64][: world.world_size]
        shares = apportion(
            GLOBAL_BATCH, weights if len(weights) == world.world_size else [1] * world.world_size
        )
        if world.rank == 0:
            print(f"{world.world_size} ranks on {world.backend}, shares {shares}", flush=True)
        for precision, dtype, tolerance in (
            ("fp32", torch.float64, 1e-9),
            ("fp32", torch.float32, 1e-5),
            ("bf16", torch.float32, 2e-2),
            ("fp16", torch.float32, 5e-3),
        ):
            base = network(norm=False).to(device, dtype)
            expected = alone(
                world, copy.deepcopy(base), 452, dtype, Precision(precision, device.type)
            )
            for micro_batch in (None, 16):
                found = together(
                    world, copy.deepcopy(base), shares, 452, dtype, precision, micro_batch
                )
                name = f"{precision}, data {dtype}, micro-batch {micro_batch}"
                checks.close_to(f"20 steps, {name}", found, expected, tolerance)
        base = network(norm=False).to(device)
        expected = alone(
            world, copy.deepcopy(base), 202, torch.float32, Precision("fp32", device.type)
        )
        error = (
            (naive(world, copy.deepcopy(base), shares, 202) - expected).norm() / expected.norm()
        ).item()
        checks.report(
            "negative control: DDP's plain mean is wrong",
            error > 1e-3,
            f"relative error {error:.1e}",
        )

        small = world.world_size - 1 + GLOBAL_BATCH  # the second step has fewer samples than ranks
        expected = alone(
            world, copy.deepcopy(base), small, torch.float32, Precision("fp32", device.type)
        )
        found = together(world, copy.deepcopy(base), shares, small, torch.float32, "fp32", None)
        checks.close_to("a rank without samples in every second step", found, expected, 1e-5)

        overflow(checks)
        if device.type == "cuda":
            synced = nn.SyncBatchNorm.convert_sync_batchnorm(network(norm=True)).to(device)
            expected = alone(
                world,
                network(norm=True).to(device),
                small,
                torch.float32,
                Precision("fp32", "cuda"),
            )
            found = together(world, synced, shares, small, torch.float32, "fp32", None)
            checks.close_to(
                "SyncBatchNorm, a rank without samples in every second step", found, expected, 1e-4
            )
            found = together(world, synced, shares, 452, torch.float32, "bf16", 16)
            checks.report(
                "SyncBatchNorm, bf16, micro-batches",
                same_on_all_ranks(world, found),
                "same bits on all ranks",
            )
        resume(checks, shares)
        if world.rank == 0:
            print(
                "all checks passed" if checks.failed == 0 else f"{checks.failed} checks FAILED",
                flush=True,
            )
        if checks.failed:
            sys.exit(1)


def overflow(checks: Checks) -> None:
    """One rank's sample overflows in fp16: all ranks skip the step and lower the scale alike."""
    world = checks.world
    model = nn.Linear(4, 2).to(world.device)
    ddp = wrap_model(model, world.device)
    before = flat(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = Precision("fp16", world.device.type).grad_scaler()
    inputs = torch.full(
        (2, 4), float("inf") if world.rank == world.world_size - 1 else 1.0, device=world.device
    )
    loss = cross_entropy(ddp(inputs), torch.zeros(2, dtype=torch.int64, device=world.device))
    scaler.scale(loss * loss_weight(2, 2 * world.world_size)).backward()
    scaler.step(optimizer)
    scaler.update()
    found = torch.cat(
        [flat(model), torch.tensor([scaler.get_scale()], device=world.device, dtype=torch.float64)]
    )
    same = same_on_all_ranks(world, found)
    checks.report(
        "fp16 overflow on one rank: all skip the step",
        torch.equal(flat(model), before) and same,
        f"scale {scaler.get_scale():.0f}",
    )


def resume(checks: Checks, shares: Sequence[int]) -> None:
    """Two epochs, then two more from the snapshot, are four: bitwise."""
    world = checks.world
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Snapshot(Path(folder) / "snapshot.pt", world.control)
        base = network(norm=True).to(world.device)
        whole = together(
            world, copy.deepcopy(base), shares, 452, torch.float32, "fp32", None, epochs=4
        )
        together(
            world, copy.deepcopy(base), shares, 452, torch.float32, "fp32", None, snapshot, epochs=2
        )
        rest = together(
            world, copy.deepcopy(base), shares, 452, torch.float32, "fp32", None, snapshot, epochs=4
        )
        error = ((rest - whole).norm() / whole.norm()).item()
        checks.report("resumed from a snapshot", error < 1e-6, f"relative error {error:.1e}")


if __name__ == "__main__":
    main()
