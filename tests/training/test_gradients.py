"""The parts of ``gradients`` that need no second rank."""

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training import init_distributed, loss_weight, no_sample_loss

from .workers import flat
from .worlds import run_world


@pytest.fixture(autouse=True, scope="module")
def _world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_no_sample_loss_gives_ddp_an_input_to_move() -> None:
    """DDP with ``device_ids`` moves its inputs to the GPU, and fails with an IndexError without."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    ddp = DistributedDataParallel(model)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs)))
    statistics = model[1].running_mean.clone()
    loss = no_sample_loss(ddp)
    loss.backward()
    assert seen == [1]
    assert loss.item() == 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    assert torch.equal(model[1].running_mean, statistics), "the model's own forward did not run"
    assert model(torch.ones(4, 3)).shape == (4, 2), "and it is back in its place"


def test_no_sample_loss_restores_a_patched_forward() -> None:
    model = nn.Linear(3, 2)
    model.forward = patched = lambda inputs: inputs + 1  # as torch.compile does
    no_sample_loss(DistributedDataParallel(model)).backward()
    assert model.forward is patched


class Wrapper(nn.Module):
    """As a framework puts around a DDP module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


def reduced(ddp: DistributedDataParallel, loss_of: nn.Module) -> int:
    """How many gradient buckets were reduced by the backward of ``no_sample_loss``."""
    buckets: list[int] = []

    def count(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.index())
        future = torch.futures.Future[torch.Tensor]()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, count)
    no_sample_loss(loss_of).backward()
    return len(buckets)


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    "wrap",
    [
        lambda ddp: ddp,
        Wrapper,
        lambda ddp: Wrapper(nn.Sequential(Wrapper(ddp))),
        lambda ddp: torch.compile(ddp, backend="eager"),
        compiled_in_place,
    ],
    ids=["itself", "wrapper", "deep", "compiled", "compiled in place"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 2),
        lambda: torch.compile(nn.Linear(3, 2), backend="eager"),
        lambda: compiled_in_place(nn.Linear(3, 2)),
    ],
    ids=["plain model", "compiled model", "model compiled in place"],
)
def test_no_sample_loss_finds_ddp_at_any_depth(
    make: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module]
) -> None:
    ddp = DistributedDataParallel(make())
    wrapped = wrap(ddp)
    if wrapped is not ddp:  # traced once, as in training
        wrapped(torch.ones(1, 3)).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert reduced(ddp, wrapped) == 1
    assert wrapped(torch.ones(4, 3)).shape == (4, 2), "forward is back in its place"


def test_no_sample_loss_refuses_a_model_without_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    assert no_sample_loss(nn.Linear(3, 2)).item() == 0  # a world of one rank needs none
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(DdpSlurmError, match="found no DistributedDataParallel in Linear"):
        no_sample_loss(nn.Linear(3, 2))


def test_no_sample_loss_refuses_several_ddp_modules() -> None:
    both = nn.Sequential(*(DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)))
    with pytest.raises(DdpSlurmError, match="Sequential has 2 DistributedDataParallel modules"):
        no_sample_loss(both)


class HalfUsed(nn.Module):
    """Two layers; ``unused`` takes no part in even steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)
        self.step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.used(inputs)
        return outputs + self.unused(inputs) if self.step % 2 else outputs


def train_half_used(pipe: Connection) -> torch.Tensor:
    """Four steps; rank 1 never has a sample."""
    with init_distributed() as world:
        model = HalfUsed()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
        for model.step in range(4):
            optimizer.zero_grad()
            if world.rank == 1:
                no_sample_loss(ddp).backward()
            else:
                (ddp(torch.ones(2, 3)).mean() * loss_weight(2, 4)).backward()
            if model.step % 2 == 0:
                assert model.unused.weight.grad is None
            optimizer.step()
        return flat(model.parameters())


def test_no_sample_loss_gives_no_gradient_to_an_unused_parameter(tmp_path: Path) -> None:
    """A zero gradient would let weight decay and momentum change it."""
    model = HalfUsed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    for model.step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).mean().backward()
        optimizer.step()
    for found in run_world(tmp_path, (1, 2), train_half_used):
        torch.testing.assert_close(found, flat(model.parameters()), rtol=1e-5, atol=1e-6)
