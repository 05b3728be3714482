"""cluster.yaml -> configuration -> live Slurm -> discover: the same machines come back."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_slurm.admin.probe import probe
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster, Node, discover
from ddp_slurm.lab import Lab

CLUSTER = """\
name: trio
nodes:
  - {name: gamma, gpus: {type: titan, count: 1}, cpus: 8, memory: 30G}
  - name: "node[9-10]"
    gpus: 2
    cpus: 12
    memory: 120G
    sockets: 1
    cores_per_socket: 6
    threads_per_core: 2
  - name: alpha
    gpus: [{type: a100, count: 3}, {type: v100, count: 1}]
    cpus: 32
    memory: 240G
    partition: big
    features: [cc80, vram80gb]
  - {name: epsilon, gpus: 4, cpus: 4, memory: 8G}
"""


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    lab = make_lab(CLUSTER)
    # Only alpha is in a partition of its own; epsilon is out of order.
    for change in (
        "PartitionName=all Nodes=gamma,node[9-10],epsilon",
        "NodeName=epsilon State=DRAIN Reason=fan",
    ):
        lab.run(["scontrol", "update", *change.split()], check=True)
    return lab


def described(nodes: tuple[Node, ...]) -> dict[str, Node]:
    """What does not depend on the lab: its nodes have addresses of their own."""
    return {node.name: node._replace(address=None) for node in nodes}


def ddp_slurm(
    lab: Lab, folder: Path, environ: dict[str, str], *arguments: str
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ddp_slurm.cli", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**environ, **lab.environ}, capture_output=True, text=True
    )


def test_round_trip(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "written.yaml"
    written.write_text(CLUSTER)
    for name, value in lab.environ.items():
        monkeypatch.setenv(name, value)
    found = discover.discover()
    expected = described(Cluster.load(written).nodes)
    del expected["epsilon"]
    assert found.name == "trio"
    assert described(found.nodes) == expected
    assert {node.name: node.address for node in found.nodes} == {
        node.name: node.address for node in lab.nodes if node.name != "epsilon"
    }
    assert capsys.readouterr().err.startswith("left out: epsilon: its state is IDLE+DRAIN: fan")


def test_the_command_and_submit_without_a_cluster_yaml(
    lab: Lab, tmp_path: Path, clean_environ: dict[str, str]
) -> None:
    shown = ddp_slurm(lab, tmp_path, clean_environ, "discover")
    assert shown.returncode == 0, shown.stderr
    (tmp_path / "found").mkdir()
    file = tmp_path / "found" / "cluster.yaml"
    file.write_text(shown.stdout)
    assert [node.name for node in Cluster.load(file).nodes] == ["alpha", "gamma", "node9", "node10"]

    job = ["--dry-run", "--name", "x", "--", "python", "train.py"]
    live = ddp_slurm(lab, tmp_path, clean_environ, "submit", *job)
    from_file = ddp_slurm(lab, tmp_path, clean_environ, "submit", "--cluster", str(file), *job)
    assert live.returncode == 0, live.stderr
    assert "left out: epsilon" in live.stderr
    assert live.stdout == from_file.stdout
    assert "--nodelist=node[9-10]" in live.stdout
    taken = lab.run(
        ["sbatch", "--test-only"],
        input=live.stdout,
        env=clean_environ,
        capture_output=True,
        text=True,
    )
    assert taken.returncode == 0, taken.stderr


NVIDIA_SMI = """\
#!/bin/sh
case $(hostname):$1 in
    alpha:*driver*)
        for n in 0 1 2; do
            echo "$n, 00000000:0$n:00.0, 40960, 535.1, NVIDIA A100-PCIE-40GB"
        done ;;
    gamma:*driver*) echo "0, 00000000:01:00.0, 12288, 535.1, NVIDIA TITAN V" ;;
    alpha:*) for n in 0 1 2; do echo "$n, 8.0"; done ;;
    *) echo "0, 7.0" ;;
esac
"""


def test_probe_the_generator_and_discover_agree(
    make_lab: Callable[..., Lab],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clean_environ: dict[str, str],
) -> None:
    """The probed file is made the configuration of a live Slurm, which is then discovered."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    environ = {**clean_environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    machines = make_lab("nodes: [{name: gamma, gpus: 1}, {name: alpha, gpus: 1}]")

    def on_machine(
        node: Node, argv: list[str], *, input: bytes | None = None, timeout_seconds: float = 60
    ) -> Answer:
        done = machines.exec(node.name, argv, input=input or b"", capture_output=True, env=environ)
        return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())

    file = tmp_path / "cluster.yaml"
    probe(["gamma", "alpha"], None, str(file), yes=True, runner=on_machine)
    probed = Cluster.load(file)
    assert [(node.name, node.gres) for node in probed.nodes] == [
        ("gamma", "gpu:titan_v:1"),
        ("alpha", "gpu:a100:3"),
    ]

    for name, value in make_lab(file.read_text()).environ.items():
        monkeypatch.setenv(name, value)

    def facts(cluster: Cluster) -> set[tuple[object, ...]]:
        return {(n.name, n.gpus, n.cpus, n.memory_mb, n.features) for n in cluster.nodes}

    assert facts(discover.discover()) == facts(probed)


def test_no_slurm_that_answers(
    tmp_path: Path, clean_environ: dict[str, str], needs_lab: None
) -> None:
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=gone\nSlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=1\n"
    )
    command = [sys.executable, "-m", "ddp_slurm.cli", "discover"]
    environ = {
        **clean_environ,
        "SLURM_CONF": str(tmp_path / "slurm.conf"),
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: scontrol ")
    assert "Traceback" not in done.stderr
