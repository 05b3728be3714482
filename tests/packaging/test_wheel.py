"""What is installed is what is here: the wheel in an empty environment renders, and brings its templates and steps."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLUSTER = "nodes:\n  - {name: gamma, gpus: {type: titan, count: 1}}\n  - {name: alpha, gpus: {type: a100, count: 4}}\n"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves its build folder where it builds."""
    copy = tmp_path_factory.mktemp("source") / "ddp_slurm"
    kept = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in kept.split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    out = copy.parent / "dist"
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(out),
        str(copy),
    ]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_it_holds_the_files_that_people_read_and_nothing_at_the_top(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ddp_slurm"}
    for folder, inside in (("slurm", "templates"), ("cluster_setup", "cluster_setup")):
        for path in (ROOT / folder).rglob("*"):
            if (
                path.is_file() and path.suffix in (".j2", ".sh", ".yml")
            ) or path.name == "Dockerfile":
                assert f"ddp_slurm/{inside}/{path.relative_to(ROOT / folder)}" in names


def test_it_renders_from_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [
        tmp_path / "venv/bin/ddp-slurm",
        "submit",
        "--backend",
        "sbatch",
        "--dry-run",
        "--",
        "python",
        "train.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gres=gpu:a100:4" in done.stdout
    code = "import importlib.util; print(importlib.util.find_spec('torch'), __import__('ddp_slurm').__file__)"
    where = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert where.stdout.startswith(f"None {tmp_path / 'venv'}"), (
        "no torch, and the installed package"
    )
