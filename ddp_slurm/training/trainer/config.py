"""The settings of a Trainer, besides model, optimizer, loss and data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch.optim.lr_scheduler import LRScheduler

from ddp_slurm.balance import BalanceError
from ddp_slurm.errors import did_you_mean, quoted
from ddp_slurm.training.graphs.choice import MODES
from ddp_slurm.training.snapshot import Snapshot
from ddp_slurm.training.trainer.records import Recorder
from ddp_slurm.training.uneven.weighted_loss import TargetWeight


@dataclass(frozen=True)
class TrainerConfig:
    """Settings of a Trainer, the same on every rank."""

    global_batch: int
    """Samples of one optimizer step over all ranks. The update is the same however they are
    shared out, so the learning rate belongs to this number and not to the number of GPUs."""
    total_epochs: int
    """Epochs of the whole training, those before a resume included."""
    shares: Sequence[int] | None = None
    """Samples of the global batch per rank, their sum ``global_batch``; 0 is allowed. None: those
    of the job's plan, measured at the start with ``--balance measured``, equal without a plan."""
    adapt_shares: bool = False
    """Change the shares while training, when the ranks' speeds change, as ``--balance adaptive``
    does. The gradient stays exact and the global batch the same."""
    micro_batch: int | Literal["auto"] | None = "auto"
    """The most samples that a rank runs at once; a larger share is accumulated over several
    backward passes. ``auto``: what each rank's GPU holds, found by trying at the start or taken
    from the file of speeds; on CPUs the whole share. None: the whole share."""
    checkpoint: Literal["auto"] | None = None
    """``auto``: a rank whose GPU would hold fewer than 8 samples at once keeps only the inputs of
    the model's parts (its children; of a Sequential each) and runs them again in backward: the same
    gradient for about a third more work. With ``micro_batch="auto"`` alone. None: no rank does."""
    target_weight: TargetWeight | None = None
    """Targets to the sum of their weights, if ``loss_function`` divides by it instead of by the
    number of samples: class weights, ignored targets, tokens. None: known for ``cross_entropy``,
    ``nll_loss`` and their modules; any other loss is taken for a mean over samples."""
    check_loss: bool = True
    """Raise an error if the loss of a batch is not the (weighted) mean of those of its halves: the
    gradient would then depend on the shares. Checked in steps 1, 2, 4, 8 and so on."""
    precision: str = "auto"
    """``fp32``, ``fp16``, ``bf16``, or ``auto``: the first of bf16, fp16, fp32 that every rank's
    card computes in hardware. The parameters stay as they are; autocast converts."""
    graphs: str = "auto"
    """``auto``: run forward and backward as a CUDA graph if that is possible and, timed in the
    first steps, faster: a fast card with a small share waits for Python otherwise. ``on``: without
    timing; an error where it is not possible. ``off``: kernel by kernel. A graph repeats what it
    recorded: of the model's Python code only the work on tensors, and no forward hook."""
    clip_norm: float | None = None
    """The largest norm of the whole gradient of an optimizer step. None: not clipped."""
    scheduler: LRScheduler | None = None
    """Stepped after every optimizer step. A scheduler that reads ``trainer.progress`` needs the
    Trainer first: assign it to ``trainer.scheduler`` then."""
    snapshot: Snapshot | None = None
    """Resumed from if the file exists, and written. None: nothing is saved, and a stop before the
    time limit is not possible."""
    save_every_epochs: int = 1
    """Epochs between snapshots; 0: none at the end of an epoch. The end of the training always
    writes one."""
    save_every_steps: int | None = None
    """Optimizer steps between snapshots, in addition. None: only at the end of epochs."""
    log_every_steps: int | None = None
    """Optimizer steps between reports. None: ten in an epoch, at least 20 steps apart. The end of
    an epoch is always reported."""
    recorders: Sequence[Recorder] = ()
    """Functions that get every record (a flat dict) on rank 0."""
    metrics_path: str | None = None
    """A .jsonl or .csv file, or with a trailing slash a TensorBoard folder, for the records. A
    resumed run continues it."""
    seed: int = 0
    """Of the order of samples and of each rank's random generators. A resumed run must have the
    same."""
    quiet: bool = False
    """Print warnings only. The recorders still get everything."""

    def __post_init__(self) -> None:
        if self.graphs not in MODES:
            raise BalanceError(f"graphs {self.graphs!r}{did_you_mean(self.graphs, list(MODES))}")
        if isinstance(self.micro_batch, str) and self.micro_batch != "auto":
            raise BalanceError(
                f"micro_batch {quoted(self.micro_batch)}: expected a number, 'auto' or None"
            )
        if self.checkpoint not in (None, "auto"):
            raise BalanceError(f"checkpoint {quoted(self.checkpoint)}: expected 'auto' or None")
        if self.checkpoint == "auto" and self.micro_batch != "auto":
            raise BalanceError(
                f"checkpoint='auto' cannot be combined with micro_batch={self.micro_batch}: it "
                "follows from what fits the memory; expected micro_batch='auto'"
            )
        if isinstance(self.micro_batch, int) and self.micro_batch < 1:
            raise BalanceError(f"micro_batch {self.micro_batch}: expected at least 1")
        if self.global_batch < 1:
            raise BalanceError(f"global_batch {self.global_batch}: expected at least 1")

    @property
    def most_at_once(self) -> int:
        """The most samples of one forward pass; the global batch where it is not a number."""
        return self.micro_batch if isinstance(self.micro_batch, int) else self.global_batch
