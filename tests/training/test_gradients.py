"""The parts of ``gradients`` that need no second rank."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_slurm.training import no_sample_loss


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
