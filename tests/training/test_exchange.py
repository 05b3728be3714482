"""Values that ranks send each other arrive as they were, and nothing in them is run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_slurm.training import exchange

from .joining import exchange_values
from .worlds import run_world

VALUES: list[Any] = [
    None,
    "ü\0",
    [1, (2.5, "x", [])],
    {0: {"step": torch.tensor(3.0)}, "1": (0.9, 0.999), None: True},
    {"tensor": ["float32", [1], ""], "tuple": 1},
    [torch.zeros(0, 2), torch.ones(2, 3).t(), torch.tensor([1.5], dtype=torch.bfloat16)],
    [torch.tensor(True), torch.arange(3, dtype=torch.uint8), math.inf, 2**70],
]


def same(one: Any, other: Any) -> bool:
    """Equal, in type as well."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return bool(one == other)


@pytest.mark.parametrize("value", VALUES)
def test_exchanged_value_arrives_unchanged(value: Any) -> None:
    assert same(exchange._decoded(exchange._encoded(value)), value)


def test_object_is_not_exchanged() -> None:
    with pytest.raises(TypeError, match="ranks cannot exchange a PosixPath"):
        exchange._encoded([Path("/")])


def test_ranks_exchange_values_of_different_sizes(tmp_path: Path) -> None:
    own = [["x" * 1000 * rank, rank] for rank in range(3)]
    for rank, (everybody, on_rank_0, of_rank_0) in enumerate(
        run_world(tmp_path, (3,), exchange_values)
    ):
        assert everybody == own
        assert on_rank_0 == (own if rank == 0 else [])
        assert of_rank_0 == own[0]
