"""The documentation site is built without a warning, and its reference pages are complete."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_slurm import job_env
from ddp_slurm.cluster import Node
from ddp_slurm.job.options import JobOptions
from ddp_slurm.schema.schema import keys_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--fail-on-warning", "--keep-going"]
    argv = [sys.executable, "-m", "sphinx", *options, "-d", str(folder / "trees")]
    done = subprocess.run(
        [*argv, str(DOCS), str(folder / "html")], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "html"


def test_site_has_every_page_of_the_folder(site: Path) -> None:
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}


def test_reference_has_every_key_and_variable(site: Path) -> None:
    job = (site / "reference" / "job_yaml.html").read_text()
    for name in keys_of(JobOptions):
        assert f">{name.replace('_', '-')}</span>" in job
    cluster = (site / "reference" / "cluster_yaml.html").read_text()
    for field, key in keys_of(Node).items():
        assert f">{key.name or field}</span>" in cluster
    variables = (site / "reference" / "variables.html").read_text()
    for name in job_env.JobEnv(1, (1,), 1, (1,), "equal", "marker").to_environ():
        assert f">{name}</span>" in variables


def test_architecture_page_has_the_drawing(site: Path) -> None:
    assert "rooms.svg" in (site / "architecture.html").read_text()
    drawing = next((site / "_images").glob("rooms*.svg")).read_text()
    for room in ("plan/", "training/", "rank_env.py"):
        assert f">{room}</text>" in drawing
