"""A Trainer's whole state as a snapshot's plain values, and back, also on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_slurm.training.exchange import gather_values
from ddp_slurm.training.random_state import random_state, set_random_state
from ddp_slurm.training.snapshot import SnapshotError

if TYPE_CHECKING:
    from ddp_slurm.training.trainer import Trainer


def run_state(trainer: Trainer) -> dict[str, Any]:
    """The state to save. All ranks call it; only rank 0's result is complete.

    ``model`` has BatchNorm statistics averaged over the ranks. ``ranks`` holds what only the same
    rank of the same world can use: its random generators, its own statistics and its sums since
    the last report; with local steps also its optimizer's state.
    """
    local_steps = trainer.optimizer_step.local_steps
    world, loss_sum = trainer.world, trainer.optimizer_step.loss_sum
    model = {name: tensor.detach() for name, tensor in trainer.module.state_dict().items()}
    model.update(trainer.batchnorm.averaged())
    own = {
        "random": random_state(world.device),
        "batchnorm": trainer.batchnorm.own_state(),
        "loss": [*loss_sum.totals(), loss_sum.samples],
    }
    if local_steps is not None:
        own["optimizer"] = trainer.optimizer.state_dict()
    rows = gather_values(own, world.control)
    scheduler = trainer.scheduler
    return {
        "epoch": trainer.epoch,
        "samples_done": trainer.samples_done,
        "step": trainer.step,
        "seed": trainer.config.seed,
        "train_samples": len(trainer.train_data),
        "model": model,
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "scaler": trainer.optimizer_step.scaler.state_dict(),
        "ranks": rows,
        "local_steps": local_steps.state() if local_steps is not None else None,
    }


def load_run_state(trainer: Trainer, state: dict[str, Any], path: Path) -> None:
    """Continue from ``state``, which was read from ``path``.

    Raises SnapshotError, on every rank, if it belongs to another model, data set or seed.
    """
    _check_same(trainer, state, path)
    try:
        trainer.module.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        if trainer.scheduler is not None and state["scheduler"] is not None:
            trainer.scheduler.load_state_dict(state["scheduler"])
        if state["scaler"]:
            trainer.optimizer_step.scaler.load_state_dict(state["scaler"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise SnapshotError(
            f"the snapshot {path} belongs to another model or optimizer: {error}"
        ) from error
    if trainer.optimizer_step.local_steps is not None:
        trainer.optimizer_step.local_steps.load_state(state.get("local_steps"))
    trainer.epoch = state["epoch"]
    trainer.samples_done = state["samples_done"]
    trainer.step = state["step"]
    if len(state["ranks"]) == trainer.world.world_size:
        own = state["ranks"][trainer.world.rank]
        set_random_state(own["random"], trainer.world.device)
        trainer.batchnorm.load_own_state(own["batchnorm"])
        if "optimizer" in own:
            trainer.optimizer.load_state_dict(own["optimizer"])
        loss, *weights, samples = own["loss"]
        # Snapshots of version 1 have no weight: it was the number of samples.
        weight = weights[0] if weights else samples
        trainer.optimizer_step.loss_sum.reset(loss, weight, samples)


def _check_same(trainer: Trainer, state: dict[str, Any], path: Path) -> None:
    samples, seed = len(trainer.train_data), trainer.config.seed
    if not {"train_samples", "seed", "ranks"} <= state.keys():
        keys = ", ".join(map(str, state)) or "nothing"
        raise SnapshotError(f"the snapshot {path} was not written by a Trainer; it holds {keys}")
    if state["train_samples"] != samples:
        raise SnapshotError(
            f"the snapshot {path} was made with {state['train_samples']} training samples, "
            f"now there are {samples}"
        )
    if state["seed"] != seed:
        raise SnapshotError(
            f"the snapshot {path} was made with the seed {state['seed']}, now it is {seed}: "
            "the order of the samples would change within the run"
        )
