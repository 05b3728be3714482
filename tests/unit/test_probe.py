"""What machines report, from recorded outputs of their tools, and the resulting cluster.yaml."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from ddp_slurm.admin.facts import Block, Facts, Topology, facts_script, gather, parse_facts
from ddp_slurm.admin.probe import probe
from ddp_slurm.admin.probe_hosts import ProbeError, nodes_of_arguments
from ddp_slurm.admin.probed_cluster import gpu_warning, probed_cluster
from ddp_slurm.admin.probed_yaml import probed_cluster_yaml
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster, ClusterError, GpuModel, Node, Ssh
from ddp_slurm.ssh.command import RemoteError

NVIDIA_SMI = """\
0, 00000000:17:00.0, 81920, 550.54.15, NVIDIA A100-SXM4-80GB
1, 00000000:65:00.0, 24564, 550.54.15, NVIDIA GeForce RTX 3090
2, 00000000:CA:00.0, 81920, 550.54.15, NVIDIA A100-SXM4-80GB"""
CAPABILITY = "0, 8.0\n1, 8.6\n2, 8.0"
ROUTES = """Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
wlp2s0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eno1\t0008A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
wlp2s0\t0001A8C0\t00000000\t0001\t0\t0\t600\t00FFFFFF\t0\t0\t0
ib0\t9808A8C0\t00000000\t0000\t0\t0\t100\tFFFFFFFF\t0\t0\t0"""


def recorded(host: str, *, gpus: str = "", cpus: int = 4, **values: str) -> Facts:
    lines = {
        "hostname": (host,),
        "kernel": ("5.15.0-91",),
        "os": ("ubuntu-22.04",),
        "memory_kib": ("33554432",),
    }
    lines |= {
        "cpu": tuple(f"0 {n // 2}" for n in range(cpus)),
        "interface": ("eno1 up 1000", "lo unknown -1"),
    }
    lines |= {key: (value,) for key, value in values.items()}
    blocks = {"routes": (Block(0, ROUTES),)}
    if gpus:
        blocks |= {
            "nvidia-smi": (Block(0, gpus),),
            "nvidia-smi.capability": (Block(0, CAPABILITY),),
        }
    return Facts(lines, blocks)


@pytest.mark.parametrize(
    ("cpus", "topology"),
    [
        (["0 0", "0 1"], Topology(1, 2, 1)),
        (["0 0", "0 0", "1 0", "1 0"], Topology(2, 1, 2)),
        (["0 0", "0 0", "0 1", "0 1", "1 0", "1 0", "1 1", "1 1"], Topology(2, 2, 2)),
        (["0 0", "0 1", "1 0"], None),
        (["0 0", "0 0", "0 1"], None),  # performance and efficiency cores
        ([], None),
    ],
)
def test_topology_counts_sockets_cores_and_threads(
    cpus: list[str], topology: Topology | None
) -> None:
    assert Facts({"cpu": tuple(cpus)}).topology == topology


def test_interface_is_that_of_the_longest_route_up() -> None:
    facts = recorded("alpha")
    assert facts.interface_towards("192.168.8.152") == "eno1"
    assert facts.interface_towards("192.168.1.7") == "wlp2s0"
    assert facts.interface_towards("8.8.8.8") == "wlp2s0"
    head, *rest = ROUTES.splitlines()
    reverse = Facts(blocks={"routes": (Block(0, "\n".join([head, *rest[::-1]])),)})
    assert reverse.interface_towards("192.168.8.152") == "eno1"
    assert facts.interface_towards("fd00::1") is None
    assert Facts().interface_towards("192.168.1.7") is None


@pytest.mark.parametrize("number", ["0000A000000:8C0", "0000A00000008C0", "-1", "0x10", "\u0661"])
def test_damaged_route_is_no_route(number: str) -> None:
    line = f"eno1 {number} 00000000 0001 0 0 100 00FFFFFF"
    facts = Facts(blocks={"routes": (Block(0, f"Iface\n{line}"),)})
    assert facts.interface_towards("192.168.8.152") is None


def test_facts_skip_a_banner_and_refuse_a_cut_output() -> None:
    banner = "Welcome!\nfact hostname liar\n"
    whole = (
        banner
        + "facts begin\nfact hostname alpha.example\nblock x 3\n|a\n|fact b c\nfacts end\nbye\n"
    )
    facts = parse_facts(whole)
    assert facts.host == "alpha"
    assert facts.block("x") == Block(3, "a\nfact b c")
    for cut in ("", "Welcome!\n", whole[: whole.index("facts end")]):
        with pytest.raises(RemoteError, match="is incomplete"):
            parse_facts(cut)


@pytest.mark.parametrize(
    "line", ["", "eno1", "eno1 up", "eno1 up x", "eno1 up 0", "eno1 up \u00b2", "eno1 up 1 2"]
)
def test_damaged_link_speed_is_unknown(line: str) -> None:
    assert Facts({"interface": (line,)}).link_speed_mbit("eno1") is None


@pytest.mark.parametrize("report", ["{", "1", "[1]", "null", '"x"'])
def test_damaged_training_report_is_an_error_of_torch(report: str) -> None:
    facts = Facts(blocks={"training": (Block(0, f"facts {report}"),)})
    assert facts.training == {"torch_error": f"its report is damaged: facts {report}"}


def test_facts_skip_a_banner_without_newline() -> None:
    script = "printf title\n" + facts_script({"DEPTH": "credential"})
    parse_facts(
        subprocess.run(["sh"], input=script, capture_output=True, text=True, check=True).stdout
    )


def stub(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)


def test_facts_script_describes_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(
        tmp_path / "bin",
        "nvidia-smi",
        f"case $1 in *driver_version*) cat <<'E'\n{NVIDIA_SMI}\nE\n;; *) exit 2 ;; esac",
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_CONNECTION", "198.18.0.1 5000 198.18.0.2 22")
    facts = gather(Node("here", address="127.0.0.1"))
    assert facts.host == os.uname().nodename.split(".")[0]
    assert facts.memory_mb == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    assert facts.cpus == os.cpu_count()
    assert [gpu.name for gpu in facts.gpus] == [
        line.split(", ")[-1] for line in NVIDIA_SMI.splitlines()
    ]
    assert facts.first("reached_at") == "198.18.0.2"
    assert abs(facts.clock_offset_seconds or 9) <= facts.clock_error_seconds + 0.1
    assert "slurmd.version" not in facts.blocks  # only the doctor asks


def test_facts_script_survives_a_hanging_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(
        tmp_path / "bin",
        "nvidia-smi",
        "case $1 in *driver_version*) trap '' TERM; exec sleep 30 ;; esac",
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    done = subprocess.run(
        ["sh"], input=facts_script({"PATIENCE": "1"}), capture_output=True, text=True, timeout=20
    )
    facts = parse_facts(done.stdout)
    assert facts.block("nvidia-smi") == Block(137, "")
    assert gpu_warning(facts) == "nvidia-smi fails: no message (exit status 137)"


def runner_of(facts: dict[str, str]):
    def runner(
        node: Node, argv: object, *, input: bytes | None = None, timeout_seconds: float = 0
    ) -> Answer:
        if node.name not in facts:
            raise RemoteError(f"{node.name}: cannot be reached")
        return Answer(0, f"facts begin\n{facts[node.name]}\nfacts end\n", "")

    return runner


ALPHA = (
    "fact hostname alpha\nfact os ubuntu-22.04\nfact memory_kib 33554432\n"
    "fact cpu 0 0\nfact cpu 0 1\nfact reached_at 192.168.8.151\n"
    "block nvidia-smi 0\n|0, 00000000:01:00.0, 24564, 535.1, NVIDIA GeForce RTX 3090"
)


def test_probe_repeated_shows_differences_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    probe(["root@alpha", "beta"], None, str(path), yes=False, runner=runner_of({"alpha": ALPHA}))
    assert "beta: cannot be reached" in capsys.readouterr().err
    (node,) = Cluster.load(path).nodes
    assert (node.name, node.address, node.memory_mb, node.cpus, node.os) == (
        "alpha",
        "192.168.8.151",
        32768 * 95 // 100,
        2,
        "ubuntu-22.04",
    )
    assert (node.gres, node.ssh.user, node.features) == ("gpu:rtx_3090:1", "root", ("vram24gb",))
    first = path.read_text()
    probe([], path, None, yes=False, runner=runner_of({"alpha": ALPHA}))
    assert path.read_text() == first
    more = {"alpha": ALPHA.replace("33554432", "16777216")}
    with pytest.raises(ProbeError, match="--yes"):
        probe([], path, None, yes=False, runner=runner_of(more))
    shown = capsys.readouterr().out
    assert "-    memory: 31129M" in shown
    assert "+    memory: 15564M" in shown
    assert path.read_text() == first
    probe([], path, None, yes=True, runner=runner_of(more))
    assert Cluster.load(path).nodes[0].memory_mb == 15564
    with pytest.raises(ProbeError, match="no node responded"):
        probe([], path, None, yes=True, runner=runner_of({}))


def test_probe_works_before_the_driver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.yaml"
    bare = ALPHA[: ALPHA.index("\nblock")]
    probe(["alpha"], None, str(path), yes=False, runner=runner_of({"alpha": bare}))
    assert "no node has a GPU" in capsys.readouterr().err
    probe([], path, None, yes=True, runner=runner_of({"alpha": ALPHA}))
    assert Cluster.load(path).nodes[0].gpu_count == 1
    path.write_text("nodes:\n  - {name: alpha, gpu: 1}\n")
    with pytest.raises(ClusterError, match="did you mean 'gpus'"):
        probe([], path, None, yes=True, runner=runner_of({"alpha": ALPHA}))


def test_probe_keeps_what_it_cannot_know(tmp_path: Path) -> None:
    kept = Node(
        "beta",
        gpus=(GpuModel(count=1),),
        cpus=2,
        memory_mb=1000,
        partition="old",
        ssh=Ssh(port=2222),
    )
    hostile = 'a "b" \\ $HOME # x: {y}'
    known = Cluster(
        "lab",
        (
            Node(
                "alpha",
                partition="big",
                constraint="volta&nvlink",
                env=(("A", hostile),),
                features=("mine", "cc70"),
            ),
            kept,
        ),
        controller="beta",
    )
    facts = {"alpha": recorded("renamed", gpus=NVIDIA_SMI, reached_at="192.168.8.151")}
    asked = nodes_of_arguments(["alpha"], known)
    cluster = probed_cluster(known, asked, facts)
    path = tmp_path / "cluster.yaml"
    path.write_text(probed_cluster_yaml(cluster, facts))
    assert Cluster.load(path) == cluster
    alpha, beta = cluster.nodes
    assert beta == kept
    assert (alpha.name, alpha.partition, alpha.constraint, alpha.env) == (
        "alpha",
        "big",
        "volta&nvlink",
        (("A", hostile),),
    )
    assert alpha.features == ("mine", "cc80", "cc86", "vram24gb")
    assert cluster.controller == "beta"


def test_probe_interface_leads_to_the_other_nodes() -> None:
    facts = {
        "a": recorded("a", reached_at="192.168.1.5"),
        "b": recorded("b", reached_at="192.168.8.9"),
    }
    asked = nodes_of_arguments(["a=192.168.1.5", "b=192.168.8.9"], None)
    cluster = probed_cluster(None, asked, facts)
    assert [node.interface for node in cluster.nodes] == ["eno1", "wlp2s0"]
    assert "# 1000 Mbit/s" in probed_cluster_yaml(cluster, facts)


def test_probe_refuses_two_machines_of_one_name() -> None:
    facts = {"192.0.2.1": recorded("ubuntu"), "192.0.2.2": recorded("ubuntu")}
    with pytest.raises(ProbeError, match="'ubuntu'; give each machine a name"):
        probed_cluster(None, nodes_of_arguments(list(facts), None), facts)
    known = Cluster("x", (Node("ubuntu"),))
    with pytest.raises(ProbeError, match="ask for it as ubuntu if it is the one of the file"):
        probed_cluster(
            known, nodes_of_arguments(["ubuntu.lab"], known), {"ubuntu.lab": recorded("ubuntu")}
        )


@pytest.mark.parametrize(
    ("reached_at", "address"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("fd00::5", "fd00::5"),
        ("fe80::5%eno1", None),
        ("::1", None),
        ("127.0.1.1", None),
    ],
)
def test_probe_address_is_valid_from_all_nodes(reached_at: str, address: str | None) -> None:
    cluster = probed_cluster(None, [Node("a")], {"a": recorded("a", reached_at=reached_at)})
    assert cluster.nodes[0].address == address


def test_probe_host_may_be_a_known_address() -> None:
    known = Cluster(
        "x", (Node("alpha", address="192.0.2.1", partition="big", ssh=Ssh(user="ops")),)
    )
    assert nodes_of_arguments(["192.0.2.1", "alpha"], known) == list(known.nodes)


def test_probe_overwrites_other_files_only_with_yes(tmp_path: Path) -> None:
    path = tmp_path / "photo"
    path.write_bytes(b"\xff\xd8")
    (tmp_path / "cluster.yaml").write_text("nodes:\n  - {name: alpha, gpus: 1}\n")
    with pytest.raises(ProbeError, match="--yes to overwrite it"):
        probe(
            [], tmp_path / "cluster.yaml", str(path), yes=False, runner=runner_of({"alpha": ALPHA})
        )
    assert path.read_bytes() == b"\xff\xd8"


@pytest.mark.parametrize(
    ("argument", "names", "address", "user"),
    [
        ("gpu[01-02]", ["gpu01", "gpu02"], None, None),
        ("ops@gpu1=192.0.2.1", ["gpu1"], "192.0.2.1", "ops"),
        ("gpu1=fd00::5", ["gpu1"], "fd00::5", None),
        ("192.0.2.1", ["192.0.2.1"], None, None),
    ],
)
def test_probe_hosts_forms(
    argument: str, names: list[str], address: str | None, user: str | None
) -> None:
    nodes = nodes_of_arguments([argument], None)
    assert [node.name for node in nodes] == names
    assert (nodes[0].address, nodes[0].ssh.user) == (address, user)


@pytest.mark.parametrize(
    "argument",
    ["-oProxyCommand=id", "a b", "gpu[01-02]=192.0.2.1", "a;b", "$(id)", "@a", "a\nb", "a:22"],
)
def test_probe_hosts_refuse_hostile_text(argument: str) -> None:
    with pytest.raises(ProbeError):
        nodes_of_arguments([argument], None)


@pytest.mark.parametrize(
    ("lines", "warning"),
    [
        (
            "block nvidia-smi 9\n|NVIDIA-SMI has failed because it couldn't communicate",
            "fails: NVIDIA-SMI has",
        ),
        (
            "block nvidia-smi 15\n|0, 00000000:01:00.0, 24564, 535.1, NVIDIA A100\n"
            "|Unable to determine the device handle",
            "fails: Unable to determine",
        ),
        (
            "block nvidia-smi 0\n|0, 00000000:01:00.0, [GPU is lost], 5, [GPU is lost]",
            "GPU 0 at 00000000:01:00.0: [GPU",
        ),
        ("block nvidia-smi 124\n|", "fails: no message (exit status 124)"),
        (
            "block nvidia-smi 0\n|No devices were found\nfact pci_gpu 0x10de",
            "nvidia-smi shows none",
        ),
        ("fact pci_gpu 0x1002\nfact pci_gpu 0x10de", "no nvidia-smi; install the driver"),
    ],
)
def test_probe_keeps_gpus_that_cannot_be_seen(
    tmp_path: Path, lines: str, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes:\n  - {name: alpha, gpus: {type: a100, count: 2}}\n")
    facts = ALPHA[: ALPHA.index("block nvidia-smi")] + lines
    probe([], path, None, yes=True, runner=runner_of({"alpha": facts}))
    assert Cluster.load(path).nodes[0].gres == "gpu:a100:2"
    assert warning in capsys.readouterr().err
