"""Activation checkpointing on the ranks that need it: the same gradient and statistics."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training import BalanceError, TrainerConfig
from ddp_slurm.training.memory.checkpoint import (
    check_checkpoint,
    checkpoint_parts,
    keep_activations,
    parts_of,
)

from .memory_worker import checkpointed_in_world
from .worlds import run_world


class Block(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum)
        self.last = nn.Linear(6, 6)

    def forward(self, inputs: Tensor, *, scale: float = 1.0) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        outputs: Tensor = self.last(nn.functional.dropout(hidden, 0.4, self.training)) * scale
        return outputs


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(0.1), nn.Tanh(), Block(None))
        self.norm, self.head = nn.InstanceNorm1d(6, track_running_stats=True), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks(inputs)
        outputs: Tensor = self.head(self.norm(hidden[:, :, None].expand(-1, -1, 4)).mean(dim=2))
        return outputs


def trained(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and buffers after two passes with dropout."""
    torch.manual_seed(5)
    for _ in range(2):
        inputs = torch.randn(9, 6, dtype=torch.float64)
        cross_entropy(model(inputs), torch.arange(9) % 3).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return gradients, list(model.buffers())


def saved_bytes(model: nn.Module) -> int:
    """That autograd keeps from a forward to its backward."""
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.randn(100, 6, dtype=torch.float64))
    return sum(sizes)


def test_checkpointed_model_has_the_same_gradient() -> None:
    plain = Network().double()
    checkpointed = copy.deepcopy(plain)
    checkpoint_parts(checkpointed)
    before = saved_bytes(copy.deepcopy(plain))
    assert saved_bytes(copy.deepcopy(checkpointed)) < 0.6 * before
    for found, expected in zip(trained(checkpointed), trained(plain), strict=True):
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert plain.state_dict().keys() == checkpointed.state_dict().keys()
    assert [layer.momentum for layer in (checkpointed.blocks[0].norm, checkpointed.blocks[2].norm)]
    keep_activations(checkpointed)
    assert not any("forward" in vars(module) for module in checkpointed.modules())


def test_parts_are_the_children_with_parameters() -> None:
    model = Network()
    expected = [model.blocks[0], model.blocks[2], model.head]
    assert [part for part in parts_of(model) if part in expected] == expected
    assert parts_of(nn.ModuleDict({"inner": model})) == parts_of(model)


def test_module_in_two_places_is_one_part() -> None:
    model, block = nn.Module(), Block(0.1)
    model.first, model.second = nn.Sequential(block), nn.Sequential(nn.Linear(6, 6), block)
    assert parts_of(model) == [block, model.second[0]]
    checkpoint_parts(model)
    keep_activations(model)
    assert "forward" not in vars(block)


def test_checkpoint_refuses_sync_batchnorm() -> None:
    with pytest.raises(DdpSlurmError, match="cannot be combined with SyncBatchNorm"):
        check_checkpoint(nn.Sequential(nn.SyncBatchNorm(3)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint": "always"}, "checkpoint 'always': expected 'auto' or None"),
        ({"checkpoint": "auto", "micro_batch": 4}, "cannot be combined with micro_batch=4"),
        ({"micro_batch": "all"}, "micro_batch 'all': expected a number, 'auto' or None"),
    ],
)
def test_checkpoint_and_micro_batch_errors(settings: dict[str, object], message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        TrainerConfig(global_batch=8, total_epochs=1, **settings)  # type: ignore[arg-type]


def test_only_the_rank_that_needs_it_checkpoints(tmp_path: Path) -> None:
    """Rank 0 has room for all; rank 1 for 3 samples, with checkpointing for 40; rank 2 for 4."""
    found = run_world(tmp_path, (1, 1, 1), checkpointed_in_world, [(99, 99), (3, 40), (4, 4)])
    assert found == [(64, False), (36, True), (3, False)]
    text = "at once: rank 1: 36, checkpointed, rank 2: 3; found in"
    assert text in (tmp_path / "rank0.log").read_text()
