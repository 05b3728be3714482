"""What the ranks of the tests of the links run."""

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_slurm.training import World, init_distributed, wrap_model
from ddp_slurm.training.links import choice
from ddp_slurm.training.links.exchange import Exchange
from ddp_slurm.training.links.layout import Layout
from ddp_slurm.training.links.local_steps import LocalConfig, LocalSteps
from ddp_slurm.training.links.wrap import mean_over_ranks

from .joining import be_impatient
from .workers import Case, Outcome, flat, train_in_parts


def make_exchange(world: World, *, two_levels: bool, bf16: bool = False) -> Exchange:
    layout = Layout.of([fact.node_rank for fact in world.ranks])
    exchange = Exchange(layout, world.device)
    exchange.two_levels, exchange.bf16 = two_levels, bf16
    return exchange


def with_hook(pipe: Connection, case: Case, two_levels: bool, bf16: bool) -> Outcome:
    with init_distributed() as world:
        exchange = make_exchange(world, two_levels=two_levels, bf16=bf16)

        def wrap(model: nn.Module, optimizer: Optimizer) -> DistributedDataParallel:
            ddp = wrap_model(model, world.device)
            ddp.register_comm_hook(exchange, mean_over_ranks)
            return ddp

        return train_in_parts(case, world.rank, wrap=wrap)


def wrapped(pipe: Connection, case: Case) -> Outcome:
    """As DDP_SLURM_COMM says; the parameters after the ranks' average."""
    with init_distributed() as world:
        models = []

        def wrap(model: nn.Module, optimizer: Optimizer) -> DistributedDataParallel:
            models.append(model)
            return world.wrap(model, optimizer, case.shares)

        outcome = train_in_parts(case, world.rank, wrap=wrap)
        world.average()
        outcome.parameters = flat(models[0].parameters())
        return outcome


def with_local_steps(pipe: Connection, case: Case, config: LocalConfig) -> Outcome:
    """In the buffers' own precision."""
    with init_distributed() as world:
        exchange = make_exchange(world, two_levels=True)
        made: list[Any] = []

        def wrap(model: nn.Module, optimizer: Optimizer) -> DistributedDataParallel:
            ddp = wrap_model(model, world.device)
            local = LocalSteps(ddp, optimizer, case.shares, exchange, world.control, config)
            made.extend((model, local))
            return ddp

        outcome = train_in_parts(case, world.rank, wrap=wrap)
        model, local = made
        local.average()
        outcome.parameters = flat(model.parameters())
        return outcome


def summed_in_bf16(pipe: Connection, values: torch.Tensor, two_levels: bool) -> torch.Tensor:
    """The sum over the ranks of ``values[rank]``."""
    with init_distributed() as world:
        exchange = make_exchange(world, two_levels=two_levels, bf16=True)
        return exchange.start(values[world.rank].clone()).wait()


def _local_world(world: World, steps: int) -> tuple[nn.Module, Optimizer]:
    os.environ["DDP_SLURM_COMM"] = f"local:{steps}"
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return world.wrap(network, optimizer, [1] * world.world_size), optimizer


def delays_of_local_steps(pipe: Connection) -> list[int]:
    """As measured, and of a snapshot with these and with other steps: an exact exchange takes 0.5 s
    here, and a step 0.1 s on rank 0, 0.05 s on rank 1."""
    choice._seconds_of = lambda exchange, size: 0.5
    os.environ["DDP_SLURM_COMM"] = "local:32"
    with init_distributed() as world:
        network = nn.Linear(700, 400)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        world.wrap(network, optimizer, [1, 1], 0.1 / (1 + world.rank))
        local = world.local_steps[0]
        delays = [local.config.steps_of_delay]
        for timing in ([32, 3], [8, 4]):
            local.load_state({**local.state(), "timing": timing})
            delays.append(local.config.steps_of_delay)
        return delays


def skip_a_step(pipe: Connection) -> None:
    """As a GradScaler does on a rank whose gradient overflows."""
    with init_distributed() as world:
        model, optimizer = _local_world(world, 4)
        for step in range(8):
            model(torch.ones(1, 2)).sum().backward()
            if (step, world.rank) != (2, 1):
                optimizer.step()
            if step == 3:
                world.average()


def die_between_averages(pipe: Connection) -> None:
    be_impatient()
    with init_distributed() as world:
        model, optimizer = _local_world(world, 2)
        for step in range(100):
            model(torch.ones(1, 2)).sum().backward()
            if (step, world.rank) == (6, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()


def wrap_a_large_model(pipe: Connection) -> tuple[bool, bool]:
    """Whether two levels won, and whether the gradient is right. The inside of a node is fast, the
    rest slow."""
    real = choice._seconds_of

    def seconds_of(exchange: Exchange, size: int) -> float:
        return real(exchange, size) / (5 if exchange.two_levels else 1)

    choice._seconds_of = seconds_of
    with init_distributed() as world:
        network = nn.Linear(700, 400, bias=False)
        hooks: list[Exchange] = []
        register = DistributedDataParallel.register_comm_hook

        def noted(ddp: DistributedDataParallel, state: Exchange, hook: Any) -> None:
            hooks.append(state)
            register(ddp, state, hook)

        DistributedDataParallel.register_comm_hook = noted  # type: ignore[method-assign]
        model = world.wrap(network)
        model(torch.full((1, 700), float(world.rank))).sum().backward()
        assert network.weight.grad is not None
        mean = (world.world_size - 1) / 2
        return hooks[0].two_levels, bool((network.weight.grad - mean).abs().max() < 1e-5)


def gradient_in_buckets(pipe: Connection, bucket_bytes: int | None) -> tuple[int, bool]:
    """All-reduces in one backward of three layers of 1.2 MB, and whether the gradient is right."""
    if bucket_bytes is not None:
        os.environ["DDP_SLURM_BUCKET_BYTES"] = str(bucket_bytes)
    with init_distributed() as world:
        network = nn.Sequential(*[nn.Linear(550, 550, bias=False) for _ in range(3)])
        model = world.wrap(network)
        sizes: list[int] = []

        def count(state: None, bucket: GradBucket) -> Future[Tensor]:
            sizes.append(bucket.buffer().numel())
            return allreduce_hook(None, bucket)

        model.register_comm_hook(None, count)
        inputs = torch.full((1, 550), float(world.rank))
        model(inputs).sum().backward()
        half = 0.5 * torch.autograd.grad(network(torch.ones(1, 550)).sum(), network[0].weight)[0]
        assert network[0].weight.grad is not None
        return len(sizes), torch.allclose(network[0].weight.grad, half)


def forget_to_wrap(pipe: Connection) -> None:
    with init_distributed():
        pass


def forget_to_average(pipe: Connection) -> None:
    with init_distributed() as world:
        model, optimizer = _local_world(world, 4)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def wrap_without_optimizer(pipe: Connection) -> None:
    with init_distributed() as world:
        world.wrap(nn.Linear(2, 2))


def compressed_gradients(pipe: Connection, samples: int) -> tuple[float, float]:
    """PowerSGD's relative error before and after its exact steps: the gradient of a 40 x 30 matrix
    over so many samples, which is its rank."""
    os.environ["DDP_SLURM_COMM"] = "powersgd"
    errors = []
    with init_distributed() as world:
        network = nn.Linear(40, 30, bias=False)
        model = world.wrap(network)
        share = samples // world.world_size
        own = slice(world.rank * share, (world.rank + 1) * share)
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(samples, 40, generator=generator)
        factors = torch.randn(samples, 30, generator=generator)
        exact = factors.T @ inputs / world.world_size
        for _ in range(14):
            network.zero_grad()
            (model(inputs[own]) * factors[own]).sum().backward()
            assert network.weight.grad is not None
            errors.append(((network.weight.grad - exact).norm() / exact.norm()).item())
        return errors[5], errors[-1]
