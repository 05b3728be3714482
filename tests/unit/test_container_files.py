"""The files for docker, read without an engine: their commands and the files that they name."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster_setup"


def substitute(text: str, values: dict[str, str]) -> str:
    """Compose's ${NAME:-default}, ${NAME:?message} and ${NAME:+text}."""

    def value(match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        if operator == ":+":
            return word if values.get(name) else ""
        if operator == ":?" and not values.get(name):
            raise KeyError(f"{name}: {word}")
        return values.get(name) or word or ""

    return re.sub(r"\$\{(\w+)(?:(:[-?+])([^}]*))?\}", value, text)


def service(name: str = "train") -> dict[str, object]:
    return yaml.safe_load((FOLDER / "compose.yml").read_text())["services"][name]


BOX = {"GPUS": "2", "NODE_RANK": "1", "MASTER_ADDR": "192.0.2.1"}


def test_compose_command_is_a_torchrun_line() -> None:
    assert shlex.split(substitute(str(service()["command"]), {**BOX, "COMMAND": "t.py 'a b'"})) == [
        "python",
        "-m",
        "ddp_slurm.torchrun_agent",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--node-rank=1",
        "--master-addr=192.0.2.1",
        "--master-port=29500",
        "--rdzv-conf=timeout=180",
        "--max-restarts=0",
        "t.py",
        "a b",
    ]


def test_compose_service_without_gpus_is_the_same_but_for_them() -> None:
    train, cpu = service(), service("cpu")
    assert cpu.pop("profiles") == ["cpu"]  # `up` alone does not start it
    assert {name: train.pop(name) for name in ("ulimits", "deploy")}
    assert train == cpu


@pytest.mark.parametrize("name", sorted(BOX))
def test_compose_names_the_missing_variable(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        substitute(str(service()["command"]), {**BOX, name: ""})


def test_compose_sets_the_interface_only_if_given() -> None:
    environment = service()["environment"]
    assert isinstance(environment, dict)
    found = [
        substitute(environment["NCCL_SOCKET_IFNAME"], values)
        for values in ({"INTERFACE": "eno1"}, {})
    ]
    assert found == ["=eno1", ""]


def test_dockerfile_copies_files_that_exist() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    assert re.findall(r"^(?!#)(\w+) ", text, re.MULTILINE) == [
        "ARG",
        "FROM",
        "COPY",
        "RUN",
        "WORKDIR",
    ]
    kept = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert {"ddp_slurm", "slurm", "cluster_setup", "setup.cfg", "pyproject.toml"} <= set(kept)
    assert [name for name in kept if not (ROOT / name).exists()] == []
