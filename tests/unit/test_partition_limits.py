"""A job that its partition will not start is warned of when it is submitted."""

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_slurm.slurm_client.partition_limits import Wanted, conflicts
from ddp_slurm.slurm_client.records import read_partitions

from .conftest import Command, Stub

RECORDED = Path(__file__).parent / "scontrol" / "24.11" / "partition_lines.txt"
PARTITIONS = read_partitions(RECORDED.read_text())
FITS = Wanted(
    partition="big mem",
    nodes=1,
    minutes=60,
    account="phys",
    user="ann",
    groups=frozenset({"users", "adm"}),
)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nodes": 2}, "2 nodes in a component; MaxNodes is 1"),
        ({"minutes": 61}, "--time is 61 minutes; MaxTime is 60 minutes"),
        ({"account": "chem"}, "--account chem; AllowAccounts is phys"),
        ({"groups": frozenset({"users"})}, "ann is in none of its AllowGroups, adm,sudo"),
    ],
)
def test_limit_that_is_not_kept(changes: dict[str, object], text: str) -> None:
    wanted = replace(FITS, **changes)  # type: ignore[arg-type]
    assert conflicts(wanted, PARTITIONS) == [f"partition 'big mem': {text}"]


def test_limits_that_are_kept() -> None:
    assert conflicts(FITS, PARTITIONS) == []
    assert conflicts(replace(FITS, minutes=None, account=None), PARTITIONS) == []
    assert conflicts(replace(FITS, user="root", groups=frozenset()), PARTITIONS) == []
    assert conflicts(replace(FITS, partition="unknown", nodes=9), PARTITIONS) == []
    assert conflicts(replace(FITS, partition=None, nodes=9), PARTITIONS) == []
    (down,) = conflicts(FITS, [PARTITIONS[1]._replace(state="DOWN")])
    assert down == "partition 'big mem': its state is DOWN"


def test_submit_warns_and_submits(uneven: Path, submit: Command, stub: Stub) -> None:
    limited = "PartitionName=all\n   Default=YES State=UP MaxNodes=9 MaxTime=00:30:00"
    stub("scontrol", f'[[ "$*" != "--all show partition" ]] || echo \'{limited}\'')
    stub("sbatch", "cat >/dev/null; echo 48")
    done = submit("--backend", "sbatch", "--time", "31", "--", "train.py")
    assert (done.returncode, done.stdout) == (0, "48\n")
    warning = "partition 'all': --time is 31 minutes; MaxTime is 30 minutes"
    assert done.stderr.count(f"warning: {warning}: the job may never start\n") == 1
    fits = submit("--backend", "sbatch", "--time", "30", "--", "train.py")
    assert "warning" not in fits.stderr
