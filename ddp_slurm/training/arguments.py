"""The options that both examples share."""

import argparse
import os
from collections.abc import Callable

from ..rank_env import LaunchError
from .precision import PRECISIONS
from .process_group import World


def add_arguments(parser: argparse.ArgumentParser, *, default_lr: float) -> None:
    """Add them to ``parser``; ``default_lr`` is the example's own peak learning rate."""
    parser.add_argument("total_epochs", type=number_of(1), help="epochs to train in all, a resumed run's included")
    parser.add_argument("save_every", type=number_of(1), help="epochs between snapshots")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--batch-size", type=number_of(1), metavar="N", help="samples of a step per GPU, on average")
    batch.add_argument("--global-batch-size", type=number_of(1), metavar="N", help="samples of a step on all GPUs")
    parser.add_argument("--micro-batch-size", type=number_of(1), metavar="N", help="most samples a GPU runs at once")
    parser.add_argument("--snapshot", default="snapshot.pt", metavar="FILE", help="written and resumed from")
    parser.add_argument("--precision", choices=PRECISIONS, default="auto", help="auto: what all GPUs can do")
    parser.add_argument("--lr", type=float, default=default_lr, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--clip-norm", type=float, metavar="NORM", help="largest norm of the gradient")
    parser.add_argument("--seed", type=number_of(0), default=0)
    parser.add_argument("--metrics", metavar="PATH", help="a .jsonl or .csv file, or FOLDER/ for TensorBoard")


def number_of(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number from ``least`` on."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return int(text)

    return parse


def global_batch_size(arguments: argparse.Namespace, world: World, default: int) -> int:
    """The one of the command line, else the job's (DDP_SLURM_GLOBAL_BATCH_SIZE), else ``default``."""
    if arguments.batch_size is not None:
        return int(arguments.batch_size) * world.world_size
    if arguments.global_batch_size is not None:
        return int(arguments.global_batch_size)
    planned = os.environ.get("DDP_SLURM_GLOBAL_BATCH_SIZE", "")
    if not planned:
        return default
    if not (planned.isascii() and planned.isdigit() and int(planned) > 0):
        raise LaunchError(f"{world.place}: DDP_SLURM_GLOBAL_BATCH_SIZE={planned!r} is not a whole number >= 1")
    return int(planned)
