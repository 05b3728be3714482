"""The recipes of docs/recipes.md run, and uneven shares give what one process alone computes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
CLUSTER = "nodes:\n  - {name: gamma, gpus: 1}\n  - {name: beta, gpus: 2}\n"
SPEEDS = "gamma: {beta: 0.003}\nbeta: {beta: 0.001}\n"
USELESS = "gamma: {alpha: 9, beta: 0.003}\nbeta: {beta: 0.001}\n"


def run(folder: Path, recipe: str, *options: str) -> dict[int, str]:
    """What each rank reported."""
    done = submit(folder, recipe, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(rank): rest for rank, rest in re.findall(r"RESULT rank=(\d+) (.*)", done.stdout)}


def submit(folder: Path, recipe: str, *options: str) -> "subprocess.CompletedProcess[str]":
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "speeds.yaml").write_text(SPEEDS)
    (folder / "useless.yaml").write_text(USELESS)
    command = [
        sys.executable,
        "-m",
        "ddp_slurm.submit",
        "--backend",
        "local",
        *options,
        "--",
        str(RECIPES / recipe),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def parameters(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"(?:weight|bias)=(\S+)", text)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The parameters that one process ends with."""
    found = run(
        tmp_path_factory.mktemp("alone"), "sampler.py", "--gpus", "1", "--global-batch-size", "112"
    )
    assert found[0].endswith(f"seen={15 * 1120}")
    return parameters(found[0])


@pytest.mark.parametrize(
    ("recipe", "options", "ranks"),
    [
        ("sampler.py", ["--balance", "speeds.yaml"], 3),
        ("sampler.py", ["--balance", "useless.yaml"], 3),
        ("lightning_shares.py", ["--balance", "speeds.yaml"], 3),
        ("one_process_a_node.py", ["--ranks", "node"], 2),
        ("sampler.py", ["--balance", "measured"], 3),
        ("one_process_a_node.py", ["--ranks", "node", "--balance", "measured"], 2),
    ],
)
def test_recipe_gives_what_one_process_gives(
    tmp_path: Path, alone: list[float], recipe: str, options: list[str], ranks: int
) -> None:
    found = run(tmp_path, recipe, *options, "--global-batch-size", "112")
    assert sorted(found) == list(range(ranks))
    for text in found.values():
        assert f"world={ranks}" in text
        assert parameters(text) == pytest.approx(alone, abs=2e-5)
    if recipe == "sampler.py" and "measured" not in options:
        shares = [16, 48, 48] if "speeds.yaml" in options else [0, 56, 56]
        assert [int(re.findall(r"seen=(\d+)", found[rank])[0]) for rank in range(3)] == [
            150 * share for share in shares
        ]


def test_lightning_refuses_measured_shares(tmp_path: Path) -> None:
    options = ["--balance", "measured", "--global-batch-size", "112"]
    done = submit(tmp_path, "lightning_shares.py", *options)
    assert done.returncode != 0
    assert "the job asks for measured shares (--balance measured), and a Lightning" in done.stderr
    assert "submit with --balance equal or a file of speeds" in done.stderr


def test_lightning_exchanges_as_the_job_asks(tmp_path: Path, alone: list[float]) -> None:
    done = submit(tmp_path, "lightning_shares.py", "--comm", "bf16", "--global-batch-size", "112")
    assert "comm: bf16 between nodes, NOT exact, in two levels: 1+2 ranks" in done.stdout
    found = [parameters(line) for line in done.stdout.splitlines() if "RESULT" in line]
    assert len(found) == 3
    for values in found:
        assert values == found[0] == pytest.approx(alone, rel=1e-2)
