"""The wheel in an empty environment renders, and contains its templates and steps."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.clusters import UNEVEN

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "ddp_slurm": "ddp_slurm",
    "slurm": "ddp_slurm/templates",
    "cluster_setup": "ddp_slurm/cluster_setup",
}
"""Folder here -> folder in the wheel."""
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
    options = ["--wheel", "--no-isolation", "--outdir", str(out)]
    build = [sys.executable, "-m", "build", *options, str(copy)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_all_files_under_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ddp_slurm"}
    for folder, inside in PACKAGES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".j2", ".sh", ".yml") or path.name == "Dockerfile":
                assert f"{inside}/{path.relative_to(ROOT / folder)}" in names


def test_wheel_renders_from_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
    (tmp_path / "cluster.yaml").write_text(UNEVEN)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = ["submit", "--backend", "sbatch", "--dry-run", "--", "python", "train.py"]
    command = [tmp_path / "venv/bin/ddp-slurm", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gres=gpu:a100:4" in done.stdout
    code = """
import importlib.util
import ddp_slurm
print(importlib.util.find_spec("torch"), ddp_slurm.__file__)
"""
    where = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    no_torch, installed = "None", tmp_path / "venv"
    assert where.stdout.startswith(f"{no_torch} {installed}")
