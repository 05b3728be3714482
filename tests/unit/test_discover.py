"""A cluster from scontrol's output, recorded on live daemons of four releases."""

import re
from pathlib import Path

import pytest

from ddp_slurm.cluster import GpuModel, Node
from ddp_slurm.cluster.discover import Discovered, DiscoverError, cluster_of, discover
from ddp_slurm.slurm_client.records import read_nodes

RECORDED = Path(__file__).parent / "scontrol"
NODE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1 CPUAlloc=0 CPUEfctv=8 CPUTot=8 "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:a100:4 NodeAddr=n1 NodeHostName=n1 "
    "Version=22.05.8 OS=Linux 6.1.0 #1 SMP @0 RealMemory=30720 AllocMem=0 Sockets=8 Boards=1 "
    "State=IDLE ThreadsPerCore=1 Weight=1 Partitions=main CfgTRES=cpu=8"
)
PARTITION = (
    "PartitionName=main AllowGroups=ALL Default=YES Nodes=n1 RootOnly=NO State=UP "
    "TotalCPUs=8 TotalNodes=1"
)


def read(*changes: tuple[str, str], partitions: str = PARTITION) -> Discovered:
    line = NODE
    for old, new in changes:
        assert old in line
        line = line.replace(old, new)
    usable = NODE.replace("n1", "other")
    return cluster_of(f"{line}\n{usable}\n", partitions, "lab")


def first_node(*changes: tuple[str, str], partitions: str = PARTITION) -> Node:
    return read(*changes, partitions=partitions).cluster.nodes[0]


@pytest.mark.parametrize("release", ["20.11", "22.05", "24.11", "26.05"])
def test_recorded_on_live_daemons(release: str) -> None:
    nodes = (RECORDED / release / "node.txt").read_text()
    assert f"Version={release}." in nodes
    found = cluster_of(nodes, (RECORDED / release / "partition.txt").read_text(), "trio")
    expected = {
        "alpha": Node(
            "alpha",
            (GpuModel(type="a100", count=3), GpuModel(type="v100", count=1)),
            32,
            245760,
            "198.18.2.5",
            partition="big",
            sockets=2,
            cores_per_socket=8,
            threads_per_core=2,
        ),
        "beta": Node(
            "beta", (GpuModel(count=2),), 16, 61440, "198.18.2.2", features=("volta", "vram32gb")
        ),
        "gamma": Node("gamma", (GpuModel(type="titan", count=1),), 8, 30720, "198.18.2.1"),
        "login": Node("login", (), 4, 8000, "198.18.2.6"),
        **{
            name: Node(
                name,
                (GpuModel(type="rtx_3090", count=2),),
                12,
                122880,
                address,
                sockets=1,
                cores_per_socket=6,
                threads_per_core=2,
            )
            for name, address in (("node9", "198.18.2.3"), ("node10", "198.18.2.4"))
        },
    }
    assert {node.name: node for node in found.cluster.nodes} == expected
    delta, epsilon, zeta = found.left_out
    assert "delta: its state is DOWN: disk" in delta
    assert (
        "epsilon: its state is IDLE+DRAIN: gres/gpu count reported lower than configured (1 < 4)"
        in epsilon
    )
    assert "zeta: no open partition has it (Partitions=closed)" in zeta


@pytest.mark.parametrize("release", ["20.11", "22.05", "24.11", "26.05"])
def test_free_text_recorded_on_live_daemons(release: str) -> None:
    """alpha's reason and beta's comment hold Gres=, State=, CPUTot= and MemSpecLimit=."""
    nodes = (RECORDED / release / "node_lines.txt").read_text()
    assert re.search(r"^ +Reason=fan.*\n.*State=IDLE Gres=gpu:x:9 CPUTot=1", nodes, re.MULTILINE)
    partitions = (RECORDED / release / "partition_lines.txt").read_text()
    found = cluster_of(nodes, partitions, "lab")
    (beta,) = found.cluster.nodes
    assert (beta.name, beta.gres, beta.cpus, beta.memory_mb) == ("beta", "gpu:v100:2", 16, 122880)
    assert beta.partition is None
    partition, alpha, gamma = found.left_out
    assert partition == "left out: partition big mem: cluster.yaml cannot hold its name"
    assert alpha == "left out: alpha: its state is IDLE+DRAIN: fan"
    assert "gamma: its state is" in gamma
    assert "MAINT" in gamma
    assert [record.gpus for record in read_nodes(nodes)] == [4, 2, 1]


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        (state, True)
        for state in (
            "IDLE",
            "MIXED",
            "ALLOCATED",
            "ALLOCATED+COMPLETING",
            "IDLE+CLOUD+POWERED_DOWN",
            "MIXED+PLANNED",
            "RESERVED",
            "IDLE+DYNAMIC_NORM",
            "IDLE~",
            "MIXED#",
            "IDLE+CLOUD+NOT_RESPONDING+POWERING_UP",
            "IDLE+POWERING_DOWN",
        )
    ]
    + [
        (state, False)
        for state in (
            "DOWN",
            "DOWN*",
            "IDLE*",
            "DOWN+NOT_RESPONDING",
            "MIXED+DRAIN",
            "IDLE+DRAIN+CLOUD",
            "DRAINED",
            "FUTURE",
            "UNKNOWN*",
            "INVAL",
            "IDLE+FAIL",
            "IDLE+MAINT",
            "IDLE+MAINTENANCE+RESERVED",
            "MAINT",
            "IDLE$",
            "IDLE+INVALID_REG",
            "DOWN+CLOUD+POWERED_DOWN",
        )
    ],
)
def test_states(state: str, usable: bool) -> None:
    found = read(("State=IDLE", f"State={state}"))
    assert ("n1" in [node.name for node in found.cluster.nodes]) == usable
    assert usable == (not found.left_out)


@pytest.mark.parametrize(
    ("gres", "models"),
    [
        ("gpu:a100:4(S:0-1)", [("a100", 4)]),
        ("gpu:a100:4(S:0,2),mps:400(S:0)", [("a100", 4)]),
        ("gpu:2,gpu:titan:1(S:1)", [(None, 3)]),
        ("gpu", [(None, 1)]),
        ("gpu:1g.5gb:7", [("1g.5gb", 7)]),
        ("gpu:no_consume:3", [(None, 3)]),
        ("gpu:4090:2", [("4090", 2)]),
        ("gpu:a100", [("a100", 1)]),
        ("shard:gpu:8,craynetwork:2", []),
        ("(null)", []),
    ],
)
def test_gres(gres: str, models: list[tuple[str | None, int]]) -> None:
    node = first_node(("Gres=gpu:a100:4", f"Gres={gres}"))
    assert [(model.type, model.count) for model in node.gpus] == models


def test_what_cluster_yaml_cannot_hold_is_named() -> None:
    found = read(
        ("gpu:a100:4", "gpu:a+b:4"), ("AvailableFeatures=(null)", "AvailableFeatures=ib,rack=3,a&b")
    )
    assert found.cluster.nodes[0].gpus == (GpuModel(count=4),)
    assert found.cluster.nodes[0].features == ("ib", "rack=3")
    assert "n1: the type 'a+b'" in found.left_out[0]
    assert "n1: its feature 'a&b'" in found.left_out[1]


def test_cpus_and_memory_are_those_that_a_job_can_have() -> None:
    node = first_node(
        ("CPUEfctv=8", "CPUEfctv=6"), ("RealMemory=30720", "RealMemory=30720 MemSpecLimit=2048")
    )
    assert (node.cpus, node.memory_mb) == (6, 28672)
    assert first_node(("CPUEfctv=8 ", "")).cpus == 8
    assert first_node(("RealMemory=30720", "RealMemory=1")).memory_mb is None, (
        "1 is Slurm's word for 'not configured'"
    )


@pytest.mark.parametrize(
    ("partitions", "chosen"),
    [
        ([("main", "Default=YES State=UP")], None),
        ([("main", "Default=NO State=UP")], "main"),
        ([("main", "Default=NO State=UP"), ("all", "Default=YES State=UP")], None),
        ([("main", "Default=NO State=UP"), ("all", "Default=YES State=DOWN")], "main"),
        (
            [
                ("main", "Default=NO State=UP TotalNodes=2"),
                ("all", "Default=NO State=UP TotalNodes=9"),
            ],
            "all",
        ),
        (
            [
                ("all", "Default=NO State=UP RootOnly=YES"),
                ("main", "Default=NO State=UP RootOnly=NO"),
            ],
            "main",
        ),
    ],
)
def test_partition(partitions: list[tuple[str, str]], chosen: str | None) -> None:
    text = "\n".join(f"PartitionName={name} {rest}" for name, rest in partitions)
    assert first_node(("Partitions=main", "Partitions=all,main"), partitions=text) == Node(
        "n1", (GpuModel(type="a100", count=4),), 8, 30720, partition=chosen
    )


LIMITED = "AllowGroups=adm,sudo AllowAccounts=ALL State=UP RootOnly=NO"


@pytest.mark.parametrize(
    ("user", "groups", "chosen"),
    [("ann", {"users"}, "main"), ("ann", {"sudo"}, "big"), ("root", set(), "big")],
)
def test_partition_of_other_groups_is_left_out(
    user: str, groups: set[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_slurm.cluster.discover.user_name", lambda: user)
    monkeypatch.setattr("ddp_slurm.cluster.discover.group_names", lambda: frozenset(groups))
    partitions = (
        f"PartitionName=big {LIMITED} Default=NO TotalNodes=9\n"
        "PartitionName=main AllowGroups=ALL AllowAccounts=ALL State=UP RootOnly=NO Default=NO"
    )
    found = read(("Partitions=main", "Partitions=big,main"), partitions=partitions)
    assert found.cluster.nodes[0].partition == chosen
    message = "left out: partition big: ann is in none of its AllowGroups, adm,sudo"
    assert (message in found.left_out) == (chosen == "main")


def test_partition_of_every_account_is_preferred() -> None:
    limited = "PartitionName=big AllowAccounts=phys State=UP RootOnly=NO TotalNodes=9"
    everybody = "PartitionName=main AllowAccounts=ALL State=UP RootOnly=NO TotalNodes=1"
    change = ("Partitions=main", "Partitions=big,main")
    assert first_node(change, partitions=f"{limited}\n{everybody}").partition == "main"
    found = read(change, partitions=limited)
    assert found.cluster.nodes[0].partition == "big"
    assert found.left_out == (
        "left out: other: no open partition has it (Partitions=main)",
        "partition big takes the accounts phys only: give one by --account",
    )


BLANK = "PartitionName=big mem\n   State=UP RootOnly=NO TotalNodes=9 Default={default}"


@pytest.mark.parametrize(("default", "chosen"), [("NO", "main"), ("YES", None)])
def test_partition_with_a_blank_in_its_name(default: str, chosen: str | None) -> None:
    main = PARTITION.replace("Default=YES", "Default=NO")
    text = f"{BLANK.format(default=default)}\n{main}"
    node = first_node(("Partitions=main", "Partitions=big mem,main"), partitions=text)
    assert node.partition == chosen


def test_node_in_a_partition_with_a_blank_only() -> None:
    nodes = NODE.replace("Partitions=main", "Partitions=big mem")
    with pytest.raises(DiscoverError, match="no open partition has it"):
        cluster_of(nodes, BLANK.format(default="NO"), "lab")


def test_node_that_cluster_yaml_cannot_hold_is_left_out() -> None:
    found = read(("Gres=gpu:a100:4", "Gres=gpu:99999999"))
    assert [node.name for node in found.cluster.nodes] == ["other"]
    assert "left out: n1: cluster.yaml cannot hold it: " in found.left_out[0]


def test_no_node_to_train_on() -> None:
    drained = (
        NODE.replace("State=IDLE", "State=IDLE+DRAIN") + " Reason=broken [root@2026-01-01T00:00:00]"
    )
    with pytest.raises(
        DiscoverError, match=r"(?s)n1: its state is IDLE\+DRAIN: broken.*no usable node with a GPU"
    ):
        cluster_of(drained, PARTITION, "lab")
    with pytest.raises(DiscoverError, match="no usable node with a GPU"):
        cluster_of("No nodes in the system\n", PARTITION, "lab")


SCONTROL = r"""
[[ -z ${SLURM_CLUSTERS:-} ]] || { echo "not a clean environment" >&2; exit 1; }
case "$*" in
    "show config") echo "ClusterName             = lab9" ;;
    "show node") echo "@NODE" ;;
    "show partition") echo "@PARTITION" ;;
    *) exit 1 ;;
esac
"""


def test_discover_asks_scontrol(
    stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drained = NODE.replace("n1", "n2").replace("State=IDLE", "State=DRAINED") + r" Reason=L\xfcfter"
    stub(
        "scontrol",
        SCONTROL.replace('"@NODE"', rf"$'{NODE}\n{drained}'").replace("@PARTITION", PARTITION),
    )
    monkeypatch.setenv("SLURM_CLUSTERS", "another")
    cluster = discover()
    assert (cluster.name, [node.name for node in cluster.nodes]) == ("lab9", ["n1"])
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "left out: n2: its state is DRAINED: L\ufffdfter\n", "not all reasons are UTF-8"


def test_slurm_that_does_not_answer(stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub(
        "scontrol",
        "echo 'error: Unable to contact slurm controller (connect failure)'; exit 1",
    )
    with pytest.raises(
        DiscoverError, match=r"scontrol show config: .*Unable to contact slurm controller"
    ):
        discover()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DiscoverError, match=r"no scontrol on PATH: write a cluster\.yaml"):
        discover()
