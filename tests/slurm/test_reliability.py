"""One row of the fault matrix; docs/reliability.md has all of them."""

import pytest

from tests.slurm.fault_matrix import Bench, first_match, steps_lost, table
from tests.slurm.faults import ROWS

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def bench(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench("22.05", tmp_path_factory.mktemp("faults"))


def test_fault_ends_as_the_matrix_says(bench: Bench) -> None:
    outcome = bench.run("exception")
    assert outcome.as_expected, outcome


LOG = """\
0: epoch 4/80  evaluation loss 1.0  accuracy 0.5
0: epoch 5/80  evaluation loss 0.9  accuracy 0.5
1: rank 1 on beta failed: RuntimeError: planted
0: resumed from snapshot.pt: epoch 4 of 80 done, then 0 samples, step 32
0: epoch 5/80  evaluation loss 0.9  accuracy 0.5
"""


def test_steps_lost_counts_repeated_epochs() -> None:
    assert steps_lost(LOG) == 8
    assert first_match(ROWS["exception"].named, LOG) == LOG.splitlines()[2]
    assert table([]).startswith("| fault | Slurm |")
