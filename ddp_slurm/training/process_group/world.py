"""A rank's place among all ranks, what it measures with them, and how it leaves."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_slurm.balance import planned_shares
from ddp_slurm.comm import EXACT
from ddp_slurm.job_env import ADAPTIVE, MEASURED, JobEnv
from ddp_slurm.rank_env import LaunchError, RankEnv
from ddp_slurm.training.links.layout import Layout
from ddp_slurm.training.links.local_steps import LocalSteps
from ddp_slurm.training.links.wrap import Links, attach, warn_at_end
from ddp_slurm.training.measure.shares import shares_by_measuring
from ddp_slurm.training.memory.micro_batch import find_micro_batch
from ddp_slurm.training.process_group.ending import let_gloo_rest
from ddp_slurm.training.process_group.facts import RankFacts
from ddp_slurm.training.process_group.failure import FailureWatch
from ddp_slurm.training.process_group.rendezvous import leave
from ddp_slurm.training.process_group.stop_signal import ignore_stop_signal, is_stop_requested
from ddp_slurm.training.uneven.calibrate import TrainingStep
from ddp_slurm.training.uneven.gradients import wrap_model
from ddp_slurm.training.uneven.sample_batches import TrainingData, batch_reader


@dataclass
class World:
    """This rank's place among all ranks. A context manager: leaving it closes the process group."""

    env: RankEnv
    """Complete: none of its fields is None."""
    device: torch.device
    backend: str
    """``nccl`` or ``gloo``."""
    control: dist.ProcessGroup
    """A gloo group over all ranks for small CPU messages (stop votes, snapshots, measured costs),
    so that none of them waits for the GPU."""
    ranks: list[RankFacts]
    """The facts of every rank, in rank order."""
    rendezvous_seconds: float
    """What ``init_distributed`` took on this rank."""
    _watch: FailureWatch | None = field(default=None, repr=False)
    """None in a world of one rank."""
    _is_open: bool = field(default=True, repr=False)
    local_steps: list[LocalSteps] = field(default_factory=list, repr=False)
    """Of the models that ``wrap`` has given them."""
    _is_wrapped: bool = field(default=False, repr=False)

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def world_size(self) -> int:
        return self.env.world_size

    @property
    def place(self) -> str:
        """``rank 3 on alpha``, for messages."""
        return self.ranks[self.rank].place

    @property
    def stop_requested(self) -> bool:
        """Whether this process was sent SIGUSR2 since ``init_distributed`` began."""
        return is_stop_requested()

    def planned_shares(self, global_batch: int) -> list[int]:
        """Samples of one global batch per rank, as the job's plan has them, else equal.

        A plan made for another global batch keeps its proportions. Raises LaunchError where the
        job asks for measured shares, which no plan has: ``shares`` measures them.
        """
        if self._measures:
            raise LaunchError(
                "the job asks for measured shares (--balance measured), and planned_shares() "
                f"measures nothing: in the script, replace world.planned_shares({global_batch}) "
                f"with world.shares({global_batch}, model, loss_function, data), or submit with "
                "--balance equal or a file of speeds"
            )
        if self.world_size > 1 and JobEnv.from_environ().balance == ADAPTIVE:
            raise LaunchError(
                "the job asks for shares that follow the ranks' speeds (--balance adaptive), which "
                "only the Trainer can change while it trains: for a loop of your own submit with "
                "--balance measured"
            )
        return planned_shares(global_batch, self.world_size)

    def shares(
        self,
        global_batch: int,
        model: nn.Module,
        loss_function: Callable[[Any, Any], Tensor],
        data: TrainingData,
        max_batch: int | None = None,
    ) -> list[int]:
        """Samples of one global batch per rank: measured where the job asks for it, else planned.

        All ranks call it, before ``model`` is wrapped in DistributedDataParallel. Measuring takes
        some seconds; model, gradients and random state are afterwards as they were.

        Args:
            global_batch: samples of one optimizer step over all ranks.
            model: on ``device``.
            loss_function: (outputs, targets) to the mean loss.
            data: a map-style data set of (input, target), or one batch (inputs, targets).
            max_batch: the most samples that a rank runs at once; None has no limit.
        """
        if not self._measures:
            return self.planned_shares(global_batch)
        step = TrainingStep(model, loss_function, batch_reader(data, self.device), self.device)
        return shares_by_measuring(step, global_batch, self.ranks, self.control, max_batch).shares

    def micro_batch(
        self,
        share: int,
        model: nn.Module,
        loss_function: Callable[[Any, Any], Tensor],
        data: TrainingData,
        optimizer: Optimizer | None = None,
    ) -> int:
        """The most samples, up to ``share``, that this rank's GPU runs at once; on CPUs ``share``.

        All ranks call it, before ``model`` is wrapped in DistributedDataParallel, under the same
        ``torch.autocast`` as in training. It takes up to ten seconds, none where the job's file of
        speeds has it; see ``memory.search``.

        Args:
            share: this rank's samples of a global batch.
            model, loss_function, data: as of ``shares``.
            optimizer: for the room that its state will take.

        Raises MemoryTooSmall where not even the smallest batch fits.
        """
        read = batch_reader(data, self.device)
        step = TrainingStep(model, loss_function, read, self.device, optimizer=optimizer)
        return find_micro_batch(step, share, self.control)

    def wrap(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        shares: Sequence[int] | None = None,
        compute_seconds: float | None = None,
    ) -> DistributedDataParallel:
        """DistributedDataParallel that exchanges as the job asks (``--comm``), by default exactly.

        All ranks call it, before the first backward. Local steps need ``optimizer`` and ``shares``;
        nothing else does. ``compute_seconds`` of a step, if known, lets ``--comm auto`` see what is
        hidden behind it.
        """
        self._is_wrapped = True
        ddp = wrap_model(model, self.device, JobEnv.from_environ().bucket_bytes)
        if self.world_size > 1:
            assert self._watch is not None
            links = Links(
                layout=Layout.of([fact.node_rank for fact in self.ranks]),
                device=self.device,
                comm=JobEnv.from_environ().comm or EXACT,
                timeout_seconds=self._watch.timeout_seconds,
                control=self.control,
            )
            local = attach(links, ddp, optimizer, shares, compute_seconds)
            self.local_steps += [local] if local else []
        return ddp

    def average(self) -> None:
        """Before an evaluation, before saving, and at the end: all ranks get the same parameters.

        All ranks call it. Without local steps (``--comm``) they have them anyway.
        """
        for local in self.local_steps:
            local.average()

    @property
    def _measures(self) -> bool:
        job = JobEnv.from_environ()
        is_uneven = self.world_size > 1 and job.balance == MEASURED
        return is_uneven or job.measure_file is not None

    def close(self) -> None:
        """Leave in order: rank 0, which holds the store, leaves last."""
        if not self._is_open:
            return
        self._is_open = False
        if self.rank == 0 and self.world_size > 1:
            warn_at_end(self._is_wrapped, self.local_steps)
        if self._watch is not None:
            self._watch.announce_leaving()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._watch is not None:
            leave(self._watch)

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, SystemExit):
            return
        status = None if error is None else error.code
        if not status:
            self.close()
        elif self._is_open:
            self._is_open = False
            if self._watch is not None:
                self._watch.report_exit(status)

    def _leave_at_exit(self, process: int) -> None:
        """Leave where the script ends without ``close``: no thread, not even NCCL's, may be inside
        the store when the interpreter ends, which would abort (pytorch issue 38228)."""
        if os.getpid() == process:
            self.close()
            let_gloo_rest()
            ignore_stop_signal()
