"""Snapshots for tests: a state with a step, and what is in a folder."""

from pathlib import Path
from typing import Any

import torch

from ddp_slurm.training import Snapshot


def state(number: int, size: int = 1000) -> dict[str, Any]:
    return {
        "step": number,
        "model": {"weight": torch.full((size,), float(number))},
        "ranks": [None, (1, "a", True)],
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def step(snapshot: Snapshot) -> int:
    loaded = snapshot.load()
    assert loaded is not None
    assert torch.equal(loaded["model"]["weight"], torch.full((1000,), float(loaded["step"])))
    return int(loaded["step"])
