"""The random generators of a rank, as plain values that a snapshot can hold."""

import random
import sys
from typing import Any

import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """States of torch (CPU and this rank's GPU), Python's ``random`` and, if imported, NumPy."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        import numpy as np

        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        plain_keys = [int(key) for key in keys]
        state["numpy"] = [str(name), plain_keys, int(position), int(has_gauss), float(cached)]
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the result of ``random_state``.

    A generator that this process does not have (GPU, NumPy) is skipped.
    """
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state and "numpy" in sys.modules:
        import numpy as np

        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
