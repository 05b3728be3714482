"""All ranks stop after the same step, and do not vote in each of many short ones."""

from pathlib import Path

import pytest

from ddp_slurm.training.process_group.stop_vote import MOST_STEPS_BETWEEN_VOTES

from .workers import voted
from .worlds import run_world


@pytest.mark.parametrize(
    ("step_seconds", "most_steps"), [(0.0, MOST_STEPS_BETWEEN_VOTES), (0.02, 1)]
)
def test_ranks_stop_after_the_same_step(
    tmp_path: Path, step_seconds: float, most_steps: int
) -> None:
    found = run_world(tmp_path, (1, 2), voted, step_seconds, 57)
    [(stopped, votes)] = set(found)
    assert 57 < stopped <= 57 + most_steps
    assert stopped / most_steps <= votes <= stopped


def test_short_steps_have_few_votes(tmp_path: Path) -> None:
    [(stopped, votes)] = set(run_world(tmp_path, (1, 2), voted, 0.0, 400))
    assert votes < stopped / 2
