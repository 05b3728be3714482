"""The examples' test.sh is what the generator writes from their cluster.yaml and job.yaml."""

import sys
from pathlib import Path

import pytest

from .conftest import Command

ROOT = Path(__file__).parents[2]
EXAMPLES = ("cifar10_example", "synthetic_data_example")


@pytest.mark.parametrize("example", EXAMPLES)
def test_test_sh_is_up_to_date(example: str, submit: Command, tmp_path: Path) -> None:
    done = submit("--job", "job.yaml", "--script", str(tmp_path / "test.sh"), cwd=ROOT / example)
    assert done.returncode == 0, done.stderr
    python = Path(sys.executable).name
    remedy = f"run in {example}: {python} -m ddp_slurm.submit --job job.yaml --script test.sh"
    assert (ROOT / example / "test.sh").read_text() == (tmp_path / "test.sh").read_text(), remedy
