"""A Trainer's whole state as a snapshot's plain values, and back, on this or another number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddp_slurm.training.random_state import random_state, set_random_state
from ddp_slurm.training.snapshot import SnapshotError

if TYPE_CHECKING:
    from ddp_slurm.training.trainer import Trainer


def run_state(trainer: Trainer) -> dict[str, Any]:
    """All ranks call it; only rank 0's result is whole.

    ``model`` holds BatchNorm statistics averaged over the ranks. ``ranks`` holds what only the same rank of the same
    world can use: its random generators, its own statistics and its sums since the last report.
    """
    model = {name: tensor.detach() for name, tensor in trainer.module.state_dict().items()}
    model.update(trainer.batchnorm.averaged())
    own = {
        "random": random_state(trainer.world.device),
        "batchnorm": trainer.batchnorm.own_state(),
        "loss": [trainer.loss_sum.item(), trainer.loss_samples],
    }
    rows: list[dict[str, Any] | None] = [None] * trainer.world.world_size
    dist.gather_object(
        own, rows if trainer.world.rank == 0 else None, dst=0, group=trainer.world.control
    )
    return {
        "epoch": trainer.epoch,
        "samples_done": trainer.samples_done,
        "step": trainer.step,
        "seed": trainer.seed,
        "train_samples": len(trainer.train_data),
        "model": model,
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict() if trainer.scheduler is not None else None,
        "scaler": trainer.scaler.state_dict(),
        "ranks": rows,
    }


def load_run_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Raises SnapshotError, on every rank, where the snapshot belongs to another model, data set or seed."""
    _check_same(trainer, state)
    try:
        trainer.module.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        if trainer.scheduler is not None and state["scheduler"] is not None:
            trainer.scheduler.load_state_dict(state["scheduler"])
        if state["scaler"]:
            trainer.scaler.load_state_dict(state["scaler"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise SnapshotError(
            f"the snapshot {_path(trainer)} belongs to another model or optimizer: {error}"
        ) from error
    trainer.epoch, trainer.samples_done, trainer.step = (
        state["epoch"],
        state["samples_done"],
        state["step"],
    )
    if len(state["ranks"]) == trainer.world.world_size:
        own = state["ranks"][trainer.world.rank]
        set_random_state(own["random"], trainer.world.device)
        trainer.batchnorm.load_own_state(own["batchnorm"])
        loss_sum, trainer.loss_samples = own["loss"]
        trainer.loss_sum.fill_(loss_sum)


def _check_same(trainer: Trainer, state: dict[str, Any]) -> None:
    samples = len(trainer.train_data)
    if not {"train_samples", "seed", "ranks"} <= state.keys():
        raise SnapshotError(
            f"the snapshot {_path(trainer)} is not a Trainer's; it holds {', '.join(map(str, state)) or 'nothing'}"
        )
    if state["train_samples"] != samples:
        raise SnapshotError(
            f"the snapshot {_path(trainer)} was made with {state['train_samples']} training samples, "
            f"now there are {samples}"
        )
    if state["seed"] != trainer.seed:
        raise SnapshotError(
            f"the snapshot {_path(trainer)} was made with the seed {state['seed']}, now it is {trainer.seed}: the "
            "order of the samples would change within the run"
        )


def _path(trainer: Trainer) -> str:
    return str(trainer.snapshot.path) if trainer.snapshot is not None else ""
