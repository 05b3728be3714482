"""The tutorial's commands give what docs/tutorial.md shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tutorial.md").read_text()
FOLDER = DOCS / "tutorial"


def run(folder: Path, module: str, *words: str) -> str:
    """What the command prints, in a folder with the tutorial's files and no GPU in sight."""
    for file in FOLDER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-m", module, *words]
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True).stdout


def test_cluster_file_of_the_page_is_the_one_beside_it() -> None:
    [shown] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert yaml.safe_load(shown) == yaml.safe_load((FOLDER / "cluster.yaml").read_text())


def test_plan_prints_the_table_of_the_page(tmp_path: Path) -> None:
    printed = run(tmp_path, "ddp_slurm.cli", "plan")
    assert f"$ ddp-slurm plan\n{printed}```" in PAGE


def test_lines_of_the_page_are_lines_of_the_script() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    script = {line.strip() for line in (FOLDER / "train.py").read_text().splitlines()}
    for line in code.splitlines():
        assert re.sub(r"  +#.*", "", line).strip() in script


def test_measured_shares_favour_the_fast_box(tmp_path: Path) -> None:
    words = ("--backend", "local", "--balance", "measured", "--", "python", "train.py")
    printed = run(tmp_path, "ddp_slurm.submit", *words)
    shares = [int(share) for share in re.findall(r"rank \d: (\d+) samples a step", printed)]
    assert sum(shares) == 120
    assert shares[0] > 2 * shares[1]
    assert "samples a second" in printed
