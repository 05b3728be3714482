"""One precision that every rank's card can do."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ddp_slurm.errors import DdpSlurmError, did_you_mean
from ddp_slurm.training.process_group.startup_check import RankFacts

PRECISIONS = ("auto", "fp32", "fp16", "bf16")

# Tensor cores for fp16 from 7.0, for bf16 from 8.0. Source: CUDA programming guide, features by compute capability.
NEEDED_CAPABILITY = {"fp32": (0, 0), "fp16": (7, 0), "bf16": (8, 0)}


class PrecisionError(DdpSlurmError):
    """A precision that does not exist, or that some rank's card cannot do."""


@dataclass(frozen=True)
class Precision:
    """``name`` is fp32, fp16 or bf16. fp32 is the plain one, without autocast."""

    name: str
    device_type: str

    def autocast(self) -> AbstractContextManager[object]:
        """The context for forward and loss; backward stays outside."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(
            self.device_type, torch.float16 if self.name == "fp16" else torch.bfloat16
        )

    def grad_scaler(self) -> torch.amp.GradScaler:
        """A scaler that does something with fp16 only; use it in every precision.

        All ranks find the same overflow, since they look at the same reduced gradients: they skip the same steps.
        """
        return torch.amp.GradScaler(self.device_type, enabled=self.name == "fp16")


def choose_precision(wanted: str, ranks: Sequence[RankFacts]) -> Precision:
    """The wanted precision; ``auto`` is the first of bf16, fp16, fp32 that all cards compute in hardware.

    On CPUs ``auto`` is fp32; the others work there too, slowly. Raises PrecisionError, naming rank, node and card.
    """
    if wanted not in PRECISIONS:
        raise PrecisionError(f"precision {wanted!r}{did_you_mean(wanted, list(PRECISIONS))}")
    if not all(fact.visible_gpus for fact in ranks):
        return Precision("fp32" if wanted == "auto" else wanted, "cpu")
    if wanted == "auto":
        weakest = min(fact.compute_capability for fact in ranks)
        return Precision(
            next(p for p in ("bf16", "fp16", "fp32") if NEEDED_CAPABILITY[p] <= weakest), "cuda"
        )
    needed = NEEDED_CAPABILITY[wanted]
    unable = [fact for fact in ranks if fact.compute_capability < needed]
    if unable:
        cards = ", ".join(
            f"{fact.place} has {fact.device_name} with {fact.compute_capability[0]}.{fact.compute_capability[1]}"
            for fact in unable
        )
        raise PrecisionError(
            f"precision {wanted} needs compute capability {needed[0]}.{needed[1]} on every rank, but {cards}; "
            "'auto' takes one that all ranks can do"
        )
    return Precision(wanted, "cuda")
