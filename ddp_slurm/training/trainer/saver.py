"""The Trainer's snapshots: checked at the start, loaded, saved now and then, saved or failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_slurm.console import show
from ddp_slurm.job_env import JobEnv
from ddp_slurm.training.exchange import broadcast_value
from ddp_slurm.training.snapshot import SnapshotError
from ddp_slurm.training.trainer.run_state import load_run_state, run_state

if TYPE_CHECKING:
    from ddp_slurm.training.trainer import Trainer


class Saver:
    """Saves and restores a Trainer. All ranks call every method."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._snapshot = trainer.config.snapshot
        self._probed: set[bool] = set()

    def load(self) -> None:
        """Continue from the snapshot, if one exists."""
        trainer = self.trainer
        state = self._snapshot.load() if self._snapshot is not None else None
        if self._snapshot is None or state is None:
            return
        if trainer.world.rank == 0:
            for warning in self._snapshot.warnings:
                show(f"warning: {warning}")
        load_run_state(trainer, state, self._snapshot.path)
        if trainer.prints:
            show(
                f"resumed from {self._snapshot.path}: epoch {trainer.epoch} of "
                f"{trainer.config.total_epochs} done, then {trainer.samples_done} samples, "
                f"step {trainer.step}"
            )

    def probe_once(self, *, after_step: bool) -> None:
        """Find out now, and not at the end of the training, that the state cannot be saved.

        Before the first step, and once after it: only then does the optimizer's state exist.
        """
        if self._snapshot is None or after_step in self._probed:
            return
        self._probed.add(after_step)
        if not after_step and self.trainer.world.rank == 0:
            _warn_if_not_requeued()
        state, snapshot = run_state(self.trainer), self._snapshot
        self._on_rank_0(lambda: snapshot.probe(state))

    def save(self) -> None:
        """Write a snapshot. A failure is a warning: the training continues, and the previous
        snapshot stays."""
        if self._snapshot is None:
            return
        self.trainer.world.average()
        state = run_state(self.trainer)
        if self.trainer.world.rank == 0:
            try:
                self._snapshot.save(state)
            except SnapshotError as error:
                show(f"warning: {error}")

    def save_or_fail(self) -> None:
        """Write a snapshot, or raise SnapshotError on every rank."""
        if self._snapshot is None:
            return
        self.trainer.world.average()
        state, snapshot = run_state(self.trainer), self._snapshot
        self._on_rank_0(lambda: snapshot.save(state))

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        message = None
        if self.trainer.world.rank == 0:
            try:
                action()
            except SnapshotError as error:
                message = str(error)
        message = broadcast_value(message, self.trainer.world.control)
        if message is not None:
            raise SnapshotError(message)


def _warn_if_not_requeued() -> None:
    """The job script looks for the marker's file; in a container its folder may not exist."""
    marker = JobEnv.from_environ().requeue_marker
    if marker and not os.access(Path(marker).parent, os.W_OK):
        show(
            f"warning: the job will not be requeued before its time limit: {marker} cannot be "
            "created here (a container without the job's temporary folder?)"
        )
