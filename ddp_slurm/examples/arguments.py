"""The options that both examples share, and what they mean for the Trainer."""

import argparse
import math
import re
from collections.abc import Callable

from ddp_slurm.console import show
from ddp_slurm.job_env import JobEnv
from ddp_slurm.training import Snapshot, TrainerConfig, World
from ddp_slurm.training.trainer import Result
from ddp_slurm.training.trainer.precision import PRECISIONS


def add_arguments(parser: argparse.ArgumentParser, *, default_lr: float) -> None:
    """Add them to ``parser``; ``default_lr`` is the example's own peak learning rate."""
    parser.add_argument(
        "total_epochs", type=number_of(1), help="epochs to train in all, a resumed run's included"
    )
    parser.add_argument("save_every", type=number_of(1), help="epochs between snapshots")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--batch-size", type=number_of(1), metavar="N", help="samples of a step per GPU, on average"
    )
    batch.add_argument(
        "--global-batch-size", type=number_of(1), metavar="N", help="samples of a step on all GPUs"
    )
    parser.add_argument(
        "--micro-batch-size", type=number_of(1), metavar="N", help="most samples a GPU runs at once"
    )
    parser.add_argument(
        "--snapshot", default="snapshot.pt", metavar="FILE", help="written and resumed from"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="auto", help="auto: what all GPUs can do"
    )
    parser.add_argument(
        "--lr",
        type=real_number(),
        default=default_lr,
        help="peak learning rate of a new run (default: %(default)s)",
    )
    parser.add_argument(
        "--clip-norm", type=real_number(), metavar="NORM", help="largest norm of the gradient"
    )
    parser.add_argument("--seed", type=number_of(0, 2**32), default=0)
    parser.add_argument(
        "--metrics", metavar="PATH", help="a .jsonl or .csv file, or FOLDER/ for TensorBoard"
    )


def number_of(least: int, most: int = 10**12) -> Callable[[str], int]:
    """An argparse type: a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        is_number = re.fullmatch("[0-9]{1,19}", text) is not None
        if not is_number or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} to {most}"
            )
        return int(text)

    return parse


def real_number(*, zero: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number above 0, or 0 as well."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        is_allowed = 0 < number < math.inf or (zero and number == 0)
        if not is_allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {'>=' if zero else '>'} 0")
        return number

    return parse


def part(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    number = real_number(zero=True)(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return number


def trainer_config(
    arguments: argparse.Namespace, world: World, *, default_global_batch: int
) -> TrainerConfig:
    """The Trainer's configuration for the options of ``add_arguments``."""
    return TrainerConfig(
        # The same global batch on any number of ranks, so the learning rate fits all of them.
        global_batch=global_batch_size(arguments, world, default=default_global_batch),
        micro_batch=arguments.micro_batch_size,
        total_epochs=arguments.total_epochs,
        save_every_epochs=arguments.save_every,
        precision=arguments.precision,
        clip_norm=arguments.clip_norm,
        snapshot=Snapshot(arguments.snapshot, world.control),
        metrics_path=arguments.metrics,
        seed=arguments.seed,
    )


def global_batch_size(arguments: argparse.Namespace, world: World, default: int) -> int:
    """From the command line, else the job (DDP_SLURM_GLOBAL_BATCH_SIZE), else ``default``."""
    if arguments.batch_size is not None:
        return int(arguments.batch_size) * world.world_size
    if arguments.global_batch_size is not None:
        return int(arguments.global_batch_size)
    return JobEnv.from_environ().global_batch_size or default


def print_result(world: World, result: Result) -> None:
    """The last line of a finished training, on rank 0."""
    if world.rank == 0 and result.finished:
        loss, accuracy = result.metrics["loss"], result.metrics["accuracy"]
        show(f"finished: step {result.step}, loss {loss:.4f}, accuracy {accuracy:.4f}")
