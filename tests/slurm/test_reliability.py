"""One row of the fault matrix; docs/reliability.md has all of them."""

from pathlib import Path

import pytest

from tests.slurm.fault_matrix import (
    OUTCOMES,
    PAGE,
    Bench,
    first_match,
    read_outcomes,
    steps_lost,
    table,
    write_table,
)
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


def test_page_has_the_table_of_the_outcomes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace("| rank 1: kill -9 |", "| kill |"))
    write_table(read_outcomes(OUTCOMES), page)
    assert page.read_text() == PAGE.read_text()
