"""Data that needs no download, for the example of its name."""

import torch
from torch import Tensor

from ddp_slurm.training.uneven.sampler import seed_of


def synthetic_classes(
    samples: int, *, features: int = 32, classes: int = 10, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs (samples, features) and class numbers (samples,), the same on every rank.

    The class is the largest of ``classes`` fixed random projections of the input, which a small
    network can learn.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, "synthetic"))
    projections = torch.randn(features, classes, generator=generator)
    inputs = torch.randn(samples, features, generator=generator)
    return inputs, (inputs @ projections).argmax(dim=1)
