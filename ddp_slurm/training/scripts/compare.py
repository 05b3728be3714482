"""``python -m ddp_slurm.training.scripts.compare WHOLE RANKS``: two recordings side by side."""

import sys
from typing import Any

import torch
from torch import Tensor

from ddp_slurm.console import table

ALLOWED = 1e-3
"""The largest relative difference that rounding explains in float32 after a few steps."""
DRAWS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout")
OWN_STATISTICS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


def differences(whole: dict[str, Any], ranks: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference of the gradient over all steps, by module.

    Relative to the largest element of the module's gradient in one process.
    """
    found: dict[str, float] = {}
    for alone, together in zip(whole["steps"], ranks["steps"], strict=True):
        for group in {name.rpartition(".")[0] for name in alone}:
            names = [name for name in alone if name.rpartition(".")[0] == group]
            scale = max(float(alone[name].abs().max()) for name in names) or 1.0
            largest = max(_distance(alone[name], together.get(name)) for name in names)
            found[group] = max(found.get(group, 0.0), largest / scale)
    return found


def _distance(one: Tensor, other: Tensor | None) -> float:
    return float((one - (torch.zeros_like(one) if other is None else other)).abs().max())


def likely_cause(whole: dict[str, Any], ranks: dict[str, Any]) -> str:
    """Why the gradients differ, as far as the recordings show it."""
    layers = set(whole["layers"])
    if layers & set(DRAWS):
        return "Dropout draws other masks for other batches: set its p to 0 for the comparison"
    if layers & set(OWN_STATISTICS):
        return (
            "BatchNorm normalises by each rank's own samples, as DDP does; SyncBatchNorm uses "
            "those of the whole batch"
        )
    alone, together = whole["steps"][0], ranks["steps"][0]
    first = torch.cat([alone[name].flatten() for name in alone])
    second = torch.cat([together[name].flatten() for name in alone])
    factor = float((first @ second) / (first @ first))
    if torch.allclose(second, factor * first, atol=1e-3 * float(first.abs().max())):
        return (
            f"the ranks' gradient is {factor:.3g} times that of one process: the loss is a sum, "
            "or is scaled by the number of ranks or of samples"
        )
    return (
        "the loss is not a mean over the samples (tokens, class weights, a mean of the script's "
        "own), or the two runs took other samples: seed the script, and its augmentation"
    )


def main(argv: list[str]) -> int:
    """Print the table. Returns 0 for the same gradients, 1 for others."""
    whole, ranks = (torch.load(file, weights_only=True) for file in argv)
    found = differences(whole, ranks)
    rows = [(group or "(the model)", f"{value:.1e}") for group, value in found.items()]
    print(table([("PARAMETERS", "LARGEST RELATIVE DIFFERENCE"), *sorted(rows)]))
    if max(found.values()) <= ALLOWED:
        print(f"the same gradient in {len(whole['steps'])} steps")
        return 0
    print(f"another gradient; likely cause: {likely_cause(whole, ranks)}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
