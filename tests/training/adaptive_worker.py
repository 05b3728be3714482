"""A Trainer with adaptive shares on ranks whose work takes the time that a test says."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ddp_slurm.balance import equal_shares
from ddp_slurm.curve import Curve
from ddp_slurm.rank_env import RankEnv
from ddp_slurm.training.adaptive import clock, follow
from ddp_slurm.training.measure.shares import Measured
from ddp_slurm.training.trainer import split

from .trainer_worker import Report, Run, train
from .workers import FEATURES


@dataclass(frozen=True)
class Ranks:
    """``slow`` is (rank, step, factor): from that step on. ``noise`` is a part of all times."""

    slow: tuple[int, int, float] = (0, 10**9, 1.0)
    noise: float = 0.0


def adaptive(pipe: Connection, run: Run, ranks: Ranks) -> Report:
    """Every sample takes a millisecond on an imagined clock; measurements are close together."""
    follow.FIRST, follow.EVERY, follow.LAG = (2, 5, 8), 6, 2
    now = [0.0]
    imagined = SimpleNamespace(perf_counter=lambda: now[0])
    clock.time = follow.time = imagined  # type: ignore[assignment]
    steps = [0]
    rank = RankEnv.from_environ().rank
    chance = random.Random(rank)

    def work(module: nn.Module, inputs: Any) -> None:
        if not (isinstance(module, nn.Linear) and module.in_features == FEATURES):
            return
        if module.training:
            steps[0] += 1
            slow_rank, at, factor = ranks.slow
            is_slow = rank == slow_rank and steps[0] >= at
            noise = 1 + chance.uniform(-ranks.noise, ranks.noise)
            now[0] += 0.001 * len(inputs[0]) * noise * (factor if is_slow else 1.0)

    def measure(step: Any, global_batch: int, facts: Sequence[Any], *rest: Any) -> Measured:
        curves = [Curve.line(0.0, 0.001) for _ in facts]
        return Measured(equal_shares(global_batch, len(facts)), None, curves)

    register_module_forward_pre_hook(work)  # type: ignore[arg-type]
    split.shares_by_measuring = measure  # type: ignore[attr-defined]
    return train(pipe, run)
