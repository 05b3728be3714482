"""DistributedDataParallel with the exchange that the job asks for (``--comm``)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_slurm.comm import EXACT, Comm
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job_env import JobEnv
from ddp_slurm.rank_env import RankEnv, known
from ddp_slurm.training.links.choice import (
    LEAST_BYTES,
    Measured,
    arithmetic,
    choose,
    measure,
    steps_of_delay,
)
from ddp_slurm.training.links.exchange import Exchange
from ddp_slurm.training.links.layout import Layout
from ddp_slurm.training.links.local_steps import LocalConfig, LocalSteps

POWERSGD_RANK = 2
POWERSGD_EXACT_STEPS = 10
"""At the beginning."""


@dataclass(frozen=True)
class Links:
    """The ranks' places, and the way that the job asks for."""

    layout: Layout
    device: torch.device
    comm: Comm
    timeout_seconds: float = 600.0
    """The longest that any collective may take."""
    control: dist.ProcessGroup | None = None
    """A gloo group over all ranks, which local steps need."""


def attach(
    links: Links,
    ddp: DistributedDataParallel,
    optimizer: Optimizer | None = None,
    shares: Sequence[int] | None = None,
    compute_seconds: float | None = None,
) -> LocalSteps | None:
    """Let ``ddp`` exchange as ``links.comm`` says. All ranks call it, before the first backward.

    Returns the LocalSteps of a model that takes them. Rank 0 prints what is in use, unless that is
    DDP's own all-reduce and nothing else was asked for.
    """
    layout, comm = links.layout, links.comm
    total = sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
    exchange = _needed_exchange(links, total)
    measured = None
    is_timed = comm.kind in ("exact", "auto") or (comm.kind == "local" and compute_seconds)
    if exchange is not None and is_timed and total >= LEAST_BYTES:
        measured = measure(exchange, total)
    chosen = choose(comm, measured.best if measured else None, compute_seconds)
    if exchange is not None:
        _set_up(exchange, chosen, measured)
    if dist.get_rank() == 0 and (comm.kind != "exact" or (exchange and exchange.two_levels)):
        way = _described(chosen, exchange)
        numbers = arithmetic(layout, total, measured, compute_seconds)
        print(f"comm: {way}: {numbers}", flush=True)
    if chosen.kind == "local":
        assert exchange is not None
        local = _local_steps(links, chosen, ddp, exchange, optimizer, shares)
        if measured is not None and compute_seconds:
            seconds = measured.best / (2 if exchange.bf16 else 1)
            _settle_delay(links, local, seconds, compute_seconds)
        return local
    if chosen.kind == "powersgd":
        _use_powersgd(ddp, links.device)
    elif exchange is not None and (exchange.two_levels or exchange.bf16):
        ddp.register_comm_hook(exchange, mean_over_ranks)
    return None  # without a hook: DDP's own all-reduce


def attach_by_environment(ddp: DistributedDataParallel, device: torch.device) -> None:
    """The same for the loop of a framework, which has no World and cannot take local steps.

    Raises DdpSlurmError where the job asks for them.
    """
    comm = JobEnv.from_environ().comm or EXACT
    if comm.kind == "local" or comm.allows == "local":
        raise DdpSlurmError(
            f"--comm {comm}: Lightning's loop cannot take local steps; take bf16 or auto:bf16, or "
            "ddp_slurm's Trainer"
        )
    node_rank = known(RankEnv.from_environ().node_rank, "NODE_RANK")
    own = torch.tensor([node_rank], device=device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    attach(Links(Layout.of([int(row) for row in rows]), device, comm), ddp)


def warn_at_end(is_wrapped: bool, local_steps: Sequence[LocalSteps]) -> None:
    """Print what a script that ends without an error has forgotten."""
    comm = JobEnv.from_environ().comm
    if comm is not None and not is_wrapped:
        print(
            f"warning: --comm {comm} had no effect: the script never called world.wrap", flush=True
        )
    if not all(local.is_averaged for local in local_steps):
        print(
            "warning: the ranks' parameters differ: call world.average() after the last step",
            flush=True,
        )


def _needed_exchange(links: Links, total_bytes: int) -> Exchange | None:
    """None where only one way exists, and where latency alone decides: that is DDP's own way."""
    layout, comm = links.layout, links.comm
    crosses_links = len(layout.nodes) > 1
    is_needed = {
        "exact": layout.has_two_levels and total_bytes >= LEAST_BYTES,
        "auto": crosses_links and total_bytes >= LEAST_BYTES,
        "bf16": crosses_links,
        "local": True,
        "powersgd": False,
    }
    return Exchange(layout, links.device, links.timeout_seconds) if is_needed[comm.kind] else None


def _set_up(exchange: Exchange, chosen: Comm, measured: Measured | None) -> None:
    sends_bf16 = chosen.kind in ("bf16", "local")
    exchange.bf16 = sends_bf16 and len(exchange.layout.nodes) > 1
    wins = measured.two_levels_win if measured else True
    exchange.two_levels = exchange.layout.has_two_levels and (sends_bf16 or wins)


def _described(chosen: Comm, exchange: Exchange | None) -> str:
    two_levels = exchange is not None and exchange.two_levels
    levels = "in two levels" if two_levels else "in one level"
    if chosen.kind == "powersgd":
        return (
            f"PowerSGD of rank {POWERSGD_RANK}, NOT exact, after {POWERSGD_EXACT_STEPS} exact steps"
        )
    if chosen.kind == "local":
        return f"NOT exact, {chosen.steps} local steps between two averages, {levels}"
    if chosen.kind == "bf16" and exchange is not None:
        return f"bf16 between nodes, NOT exact, {levels}"
    return f"exact, {levels}"


def _local_steps(
    links: Links,
    chosen: Comm,
    ddp: DistributedDataParallel,
    exchange: Exchange,
    optimizer: Optimizer | None,
    shares: Sequence[int] | None,
) -> LocalSteps:
    if optimizer is None or shares is None or links.control is None:
        raise DdpSlurmError(
            f"--comm {chosen} needs the optimizer and the shares of the batch: "
            "world.wrap(model, optimizer, shares)"
        )
    return LocalSteps(ddp, optimizer, shares, exchange, links.control, LocalConfig(chosen.steps))


def _settle_delay(
    links: Links, local: LocalSteps, exchange_seconds: float, compute_seconds: float
) -> None:
    """Let each average be used as soon as all ranks have it."""
    delay = torch.tensor(steps_of_delay(local.config.steps, exchange_seconds, compute_seconds))
    dist.all_reduce(delay, op=dist.ReduceOp.MAX, group=links.control)
    local.config = replace(local.config, delay=int(delay))
    if dist.get_rank() == 0:
        print(f"comm: each average is used {int(delay)} steps after it was begun", flush=True)


def mean_over_ranks(exchange: Exchange, bucket: GradBucket) -> Future[Tensor]:
    """A DDP communication hook: the mean over the ranks, as DDP itself takes it."""
    buffer = bucket.buffer()
    buffer.div_(exchange.layout.world_size)
    return exchange.start(buffer)


def _use_powersgd(ddp: DistributedDataParallel, device: torch.device) -> None:
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_EXACT_STEPS,
        # torch's default divides by zero for a layer with one output and no gradient
        orthogonalization_epsilon=1e-8,
    )
    on_cpu = device.type == "cpu"
    ddp.register_comm_hook(state, _one_after_another if on_cpu else powerSGD_hook.powerSGD_hook)


def _one_after_another(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """PowerSGD under gloo, whose threads would mix the collectives of two buckets in another order
    on each rank."""
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future
