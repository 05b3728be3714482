"""The decision for driver, torch, Python and Slurm, for machines as people own them."""

from pathlib import Path

import pytest

from ddp_slurm.admin.advise import advise
from ddp_slurm.admin.commands import advise as print_advice
from ddp_slurm.cluster import Cluster, GpuModel, Node

CU126 = "--index-url https://download.pytorch.org/whl/cu126"
CU128 = "--index-url https://download.pytorch.org/whl/cu128"
CU124 = "--index-url https://download.pytorch.org/whl/cu124"


def machine(name: str, system: str, *cards: str) -> Node:
    return Node(name, gpus=(GpuModel(),), os=system, features=cards)


CASES = {
    "volta_on_24.04": (
        [("ubuntu-24.04", "cc80"), ("ubuntu-24.04", "cc70")],
        "branch 580 ",
        f"pip install torch torchvision {CU126}",
    ),
    "turing_on_24.04": (
        [("ubuntu-24.04", "cc75"), ("ubuntu-24.04", "cc120")],
        "branch 590 ",
        "pip install torch torchvision",
    ),
    "ampere_on_20.04": (
        [("ubuntu-20.04", "cc86"), ("ubuntu-24.04", "cc86")],
        "branch 570 ",
        f"pip install torch torchvision {CU128}",
    ),
    "volta_and_hopper": (
        [("ubuntu-22.04", "cc70"), ("ubuntu-22.04", "cc90")],
        "branch 580 ",
        f"pip install 'torch<2.11' torchvision {CU126}",
    ),
    "volta_and_blackwell": (
        [("ubuntu-24.04", "cc70"), ("ubuntu-24.04", "cc120")],
        "branch 580 ",
        f"pip install 'torch==2.8.*' torchvision {CU128}",
    ),
    "pascal_and_blackwell": (
        [("ubuntu-24.04", "cc61"), ("ubuntu-24.04", "cc120")],
        "branch 580 ",
        "no wheel serves Blackwell and Maxwell or Pascal: two clusters",
    ),
    "kepler": (
        [("ubuntu-24.04", "cc37")],
        "branch 470 ",
        "no current torch serves compute capability 3.7: leave it out",
    ),
    "glibc_of_18.04": (
        [("ubuntu-18.04", "cc61"), ("ubuntu-22.04", "cc86")],
        "branch 525 ",
        f"pip install 'torch<2.7' torchvision {CU124}",
    ),
    "blackwell_on_18.04": (
        [("ubuntu-18.04", "cc120")],
        "branch 525 ",
        "Blackwell needs driver 570: a newer system",
    ),
    "debian": (
        [("debian-12", "cc80")],
        "the newest branch",
        "pip install torch torchvision",
    ),
}


@pytest.mark.parametrize(("machines", "driver", "torch"), CASES.values(), ids=CASES)
def test_advice_for_cards_and_systems(
    machines: list[tuple[str, str]], driver: str, torch: str
) -> None:
    nodes = [machine(f"n{i}", *words) for i, words in enumerate(machines)]
    lines = {line.subject: line for line in advise(Cluster("lab", tuple(nodes)))}
    assert lines["driver"].choice.startswith(driver)
    assert lines["torch"].choice == torch
    assert lines["torch"].is_problem == (not torch.startswith("pip"))


@pytest.mark.parametrize(
    ("systems", "python", "slurm"),
    [
        (["ubuntu-24.04"], "python3 -m venv", "the distribution's"),
        (["ubuntu-22.04"], "python3 -m venv", "the distribution's packages, without limits"),
        (["ubuntu-20.04"], "conda", "packages of your own, or a newer"),
        (["ubuntu-24.04", "debian-12"], "conda", "packages of your own, one release"),
    ],
)
def test_advice_for_python_and_slurm(systems: list[str], python: str, slurm: str) -> None:
    nodes = [machine(f"n{i}", system, "cc80") for i, system in enumerate(systems)]
    lines = {line.subject: line.choice for line in advise(Cluster("lab", tuple(nodes)))}
    assert lines["Python"].startswith(python)
    assert lines["Slurm"].startswith(slurm)


def test_advice_names_what_is_not_known() -> None:
    nodes = (machine("a", "ubuntu-24.04"), machine("b", "fedora-40", "cc80"))
    problems = {
        line.subject: line.choice for line in advise(Cluster("l", nodes)) if line.is_problem
    }
    assert problems == {
        "a": "compute capability unknown",
        "b": "unknown system fedora-40: not considered",
    }


def test_advise_prints_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: l\nnodes:\n  - {name: a, os: ubuntu-24.04, gpus: 1, features: [cc37]}\n")
    with pytest.raises(SystemExit) as end:
        print_advice(file)
    assert end.value.code == 2
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert rows == [["ok", "driver"], ["problem", "torch"], ["ok", "Python"], ["ok", "Slurm"]]
