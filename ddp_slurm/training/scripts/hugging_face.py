"""Hugging Face's Trainer counts the tokens of a step over all ranks: its loss needs no weight."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from ddp_slurm.training.scripts.errors import UnevenError


def install(set_mean_over_tokens: Callable[[bool], None]) -> None:
    """Report for each step of a Trainer whether its loss is divided by a count over all ranks.

    Does nothing where the script has not imported the Trainer.
    """
    module = sys.modules.get("transformers.trainer")
    if module is None or hasattr(module.Trainer.training_step, "_is_ddp_slurms"):
        return
    plain_step = module.Trainer.training_step

    @functools.wraps(plain_step)
    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        is_mean_over_tokens = counts and num_items_in_batch is not None
        if is_mean_over_tokens and not self.args.average_tokens_across_devices:
            raise UnevenError(
                "the Trainer divides each rank's loss by that rank's own number of tokens. "
                "Set TrainingArguments(average_tokens_across_devices=True)"
            )
        set_mean_over_tokens(is_mean_over_tokens)
        try:
            return plain_step(self, model, inputs, num_items_in_batch)
        finally:
            set_mean_over_tokens(False)

    training_step._is_ddp_slurms = True  # type: ignore[attr-defined]
    module.Trainer.training_step = training_step
