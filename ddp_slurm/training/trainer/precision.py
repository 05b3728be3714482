"""One precision that every rank's card can do."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ddp_slurm.errors import DdpSlurmError, did_you_mean
from ddp_slurm.training.process_group.facts import RankFacts

PRECISIONS = ("auto", "fp32", "fp16", "bf16")

NEEDED_CAPABILITY = {"bf16": (8, 0), "fp16": (7, 0), "fp32": (0, 0)}
"""The first compute capability that has tensor cores for it, in order of preference.
Source: CUDA programming guide, features by compute capability."""


class PrecisionError(DdpSlurmError):
    """A precision that does not exist, or that some rank's card cannot do."""


@dataclass(frozen=True)
class Precision:
    """``name`` is fp32, fp16 or bf16; fp32 runs without autocast."""

    name: str
    device_type: str

    def autocast(self) -> AbstractContextManager[object]:
        """The context of forward and loss; backward stays outside."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        dtype = torch.float16 if self.name == "fp16" else torch.bfloat16
        return torch.autocast(self.device_type, dtype)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """A scaler that is active with fp16 only; use it in every precision.

        All ranks find the same overflow, since they look at the same reduced gradients: they skip
        the same steps.
        """
        return torch.amp.GradScaler(self.device_type, enabled=self.name == "fp16")


def choose_precision(wanted: str, ranks: Sequence[RankFacts]) -> Precision:
    """The wanted precision; ``auto`` is the first of bf16, fp16, fp32 that all cards support.

    On CPUs ``auto`` is fp32; the others work there too, slowly.

    Raises PrecisionError with rank, node and card.
    """
    if wanted not in PRECISIONS:
        raise PrecisionError(f"precision {wanted!r}{did_you_mean(wanted, list(PRECISIONS))}")
    if not all(fact.visible_gpus for fact in ranks):
        return Precision("fp32" if wanted == "auto" else wanted, "cpu")
    if wanted == "auto":
        weakest = min(fact.compute_capability for fact in ranks)
        supported = [name for name, needed in NEEDED_CAPABILITY.items() if needed <= weakest]
        return Precision(supported[0], "cuda")
    needed = NEEDED_CAPABILITY[wanted]
    unable = [fact for fact in ranks if fact.compute_capability < needed]
    if unable:
        cards = ", ".join(_card(fact) for fact in unable)
        raise PrecisionError(
            f"precision {wanted} needs compute capability {needed[0]}.{needed[1]} on every rank, "
            f"but {cards}; 'auto' takes one that all ranks support"
        )
    return Precision(wanted, "cuda")


def _card(fact: RankFacts) -> str:
    major, minor = fact.compute_capability
    return f"{fact.place} has {fact.device_name} with {major}.{minor}"
