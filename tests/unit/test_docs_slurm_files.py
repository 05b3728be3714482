"""docs/slurm_files.md says what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_slurm.admin.configs import render_configs
from ddp_slurm.admin.slurm_releases import RELEASES, known_options
from ddp_slurm.cluster import Cluster
from ddp_slurm.cluster.write import cluster_yaml

PAGE = Path(__file__).parents[2] / "docs" / "slurm_files.md"
TEXT = PAGE.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's cluster.yaml."""
    (tmp_path / "cluster.yaml").write_text(re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[0])
    return tmp_path


def test_the_files_are_written_as_printed(folder: Path) -> None:
    first, second = (
        re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)[0].removeprefix("$ ").split("\n$ ")
    )
    for shown in (first, second):
        command, _, printed = shown.partition("\n")
        shell = command.replace("ddp-slurm", f"{sys.executable} -m ddp_slurm.cli")
        done = subprocess.run(shell, shell=True, cwd=folder, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, printed.strip()), done.stderr


def test_the_found_file_is_one_that_discover_writes(folder: Path) -> None:
    found = re.findall(r"\$ cat found\.yaml\n#.*?\n(.*?)```", TEXT, re.DOTALL)[0]
    (folder / "found.yaml").write_text(found)
    assert cluster_yaml(Cluster.load(folder / "found.yaml")) == found


def test_the_table_of_releases(folder: Path) -> None:
    for line, since in re.findall(
        r"^\| `([A-Za-z]+=[a-z_]+)(?:=95)?`.*? \| ([0-9.]{5})", TEXT, re.MULTILINE
    ):
        assert line == "CgroupPlugin=autodetect" or line in known_options(since)
        assert since == RELEASES[0] or line not in known_options(
            RELEASES[RELEASES.index(since) - 1]
        )
    cluster = Cluster.load(folder / "cluster.yaml")
    assert [
        r
        for r in RELEASES
        if "=autodetect" in render_configs(cluster, slurm_version=r)["cgroup.conf"]
    ] == ["21.08"]


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (PAGE.parent / target).exists(), target
