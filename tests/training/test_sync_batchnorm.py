"""SyncBatchNorm waits for all ranks in its forward: all must run it equally often."""

from pathlib import Path

import pytest

from .sync_batchnorm_worker import train, train_alone
from .trainer_worker import relative_error
from .worlds import run_world

SHARES = (2, 9)


@pytest.mark.parametrize("micro_batch", [None, "auto"])
def test_uneven_ranks_normalise_by_the_whole_batch(tmp_path: Path, micro_batch: str | None) -> None:
    """The last step of an epoch has two samples, both of one rank."""
    expected = train_alone(sum(SHARES))
    for found, sizes in run_world(tmp_path, (1, 1), train, SHARES, micro_batch):
        assert relative_error(found, expected) < 1e-9
        assert len(sizes) == 12, "a share at once, also without samples"


def test_all_ranks_run_as_many_passes_as_the_one_that_needs_the_most(tmp_path: Path) -> None:
    (one, few), (other, many) = run_world(tmp_path, (1, 1), train, SHARES, 4)
    assert len(few) == len(many)
    assert max(few) == 1
    assert max(many) <= 4
    assert relative_error(one, other) == 0.0
