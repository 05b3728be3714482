"""Slurm's configuration from cluster.yaml: read back line by line, for each release."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_slurm.admin.configs import ConfigsError, render_configs, write_configs
from ddp_slurm.admin.installation import USERS_MACHINES, Installation
from ddp_slurm.admin.slurm_releases import RELEASES, SlurmReleaseError, known_options, slurm_release
from ddp_slurm.cluster import Cluster
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.hostlist import expand_hostlist

CLUSTER = """\
name: Lab
nodes:
  - {name: gamma, gpus: {type: titan, count: 1}, cpus: 8, memory: 30G, features: [vram12gb]}
  - {name: beta, gpus: 2, cpus: 16, memory: 60G, address: 192.168.8.151, constraint: volta&nvlink}
  - name: alpha
    gpus: [{type: a100, count: 3, minors: [0, 2, 3]}, {type: v100, count: 2}]
    cpus: 32
    memory: 240G
    sockets: 2
    cores_per_socket: 8
    threads_per_core: 2
    partition: big
    features: [cc80, vram80gb]
  - {name: "amd[01-02]", gpus: {type: mi210, count: 2, minors: [128, 129]}, cpus: 8, memory: 30G}
  - {name: login, gpus: 0, cpus: 4, memory: 8000M, partition: all}
"""
LAB = Installation(
    state_dir="/lab/state",
    spool_dir="/lab/spool/%n",
    log_dir="/lab/log",
    run_dir="/lab",
    munge_socket="/lab/munge",
    controller="controller",
    controller_address="198.18.0.254",
    addresses={"beta": "198.18.0.2"},
    gpu_device_prefix="/lab/dev/nvidia",
    scheduler_parameters=("bf_interval=1",),
    is_lab=True,
)


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], Cluster]:
    def _load(text: str) -> Cluster:
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        return Cluster.load(file)

    return _load


@pytest.fixture
def cluster(load: Callable[[str], Cluster]) -> Cluster:
    return load(CLUSTER)


def lines_of(text: str) -> list[dict[str, str]]:
    """The options of each line that is no comment, as Slurm reads them."""
    return [
        dict(word.partition("=")[::2] for word in line.split())
        for line in text.splitlines()
        if line and not line.startswith("#")
    ]


def option(text: str, key: str) -> str:
    (value,) = [line[key] for line in lines_of(text) if key in line]
    return value


def nodes_of(text: str) -> dict[str, dict[str, str]]:
    return {
        name: line
        for line in lines_of(text)
        if "NodeName" in line
        for name in expand_hostlist(line["NodeName"])
    }


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("installation", [USERS_MACHINES, LAB], ids=["users", "lab"])
def test_lines_are_known_to_the_release_and_have_reasons(
    cluster: Cluster, release: str, installation: Installation
) -> None:
    known = known_options(release)
    files = render_configs(
        cluster,
        slurm_version=release,
        installation=installation,
        slurmdbd=True,
        health_check="/usr/local/sbin/gpu_check",
    )
    assert list(files) == ["slurm.conf", "gres.conf", "cgroup.conf", "slurmdbd.conf"]
    for name, text in files.items():
        above = ""
        for line in text.splitlines():
            if re.match(r"\w", line):
                key, _, value = line.partition(" ")[0].partition("=")
                assert key in known, f"{name} of {release}: {line}"
                younger = {
                    o.partition("=")[2]
                    for r in RELEASES
                    for o in known_options(r)
                    if o.startswith(f"{key}=")
                }
                for item in {part.partition("=")[0] for part in value.split(",")} & younger:
                    assert f"{key}={item}" in known, f"{name} of {release}: {line}"
                assert above, f"{name} of {release} gives no reason for {line}"
            above = "" if not line else above or line.startswith("#")


@pytest.mark.parametrize("option", ["CgroupAutomount", "CgroupReleaseAgentDir", "TaskAffinity"])
def test_options_that_stop_a_daemon_are_not_known(option: str) -> None:
    assert option in known_options("20.11")
    assert option not in known_options("22.05")


def test_options_depend_on_the_release(cluster: Cluster) -> None:
    def written(release: str, installation: Installation) -> tuple[str, str]:
        files = render_configs(cluster, slurm_version=release, installation=installation)
        plugin = re.search(r"^CgroupPlugin=(\S+)", files["cgroup.conf"], re.MULTILINE)
        parameters = re.search(r"^SlurmctldParameters=(\S+)", files["slurm.conf"], re.MULTILINE)
        return plugin[1] if plugin else "", parameters[1] if parameters else ""

    both = "enable_configless,node_reg_mem_percent=95"
    assert written("20.11.4", USERS_MACHINES) == ("", "enable_configless")
    assert written("21.08", USERS_MACHINES) == ("autodetect", both)
    assert written("slurm-wlm 26.05.5", USERS_MACHINES) == ("", both)
    assert written("20.11", LAB) == ("", "")
    assert written("22.05", LAB) == ("cgroup/v1", "node_reg_mem_percent=95")
    assert written("23.11", LAB)[0] == "cgroup/v1"
    assert written("24.05", LAB) == written("24.11", LAB) == ("disabled", "node_reg_mem_percent=95")


def test_slurm_conf_has_what_het_jobs_and_gpus_need(cluster: Cluster) -> None:
    files = render_configs(cluster)
    conf = files["slurm.conf"]
    expected = {
        "ClusterName": "lab",
        "SlurmctldHost": "gamma",
        "SchedulerType": "sched/backfill",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "ReturnToService": "2",
        "ProctrackType": "proctrack/cgroup",
        "TaskPlugin": "task/affinity,task/cgroup",
        "GresTypes": "gpu",
        "PropagateResourceLimitsExcept": "MEMLOCK",
        "MpiDefault": "none",
        "UnkillableStepTimeout": "180",
    }
    assert {key: option(conf, key) for key in expected} == expected
    assert set(option(conf, "SchedulerParameters").split(",")) == {
        "bf_hetjob_immediate",
        "whole_hetjob",
    }
    assert int(option(conf, "DefMemPerCPU")) == 8000 // 4, (
        "the smallest memory a CPU: more would not fit on that node"
    )
    assert {key for line in lines_of(files["cgroup.conf"]) for key in line} == {
        "ConstrainCores",
        "ConstrainDevices",
        "ConstrainRAMSpace",
    }
    assert "HealthCheckProgram" not in conf


def test_slurm_conf_nodes(cluster: Cluster) -> None:
    nodes = nodes_of(render_configs(cluster)["slurm.conf"])
    assert list(nodes) == [node.name for node in cluster.nodes]
    for node in cluster.nodes:
        line = nodes[node.name]
        assert line["CPUs"] == str(node.cpus)
        assert line["RealMemory"] == str(node.memory_mb), (
            "a job asks for all of the memory of cluster.yaml"
        )
        assert line.get("Gres", "") == node.gres
        assert line.get("NodeAddr") == node.address
    assert nodes["alpha"]["Gres"] == "gpu:a100:3,gpu:v100:2"
    assert [nodes["alpha"][key] for key in ("Sockets", "CoresPerSocket", "ThreadsPerCore")] == [
        "2",
        "8",
        "2",
    ]
    assert nodes["alpha"]["Feature"] == "cc80,vram80gb"
    assert nodes["beta"]["Feature"] == "volta,nvlink", "a job of this node asks for its constraint"
    by_weight = sorted(nodes, key=lambda name: int(nodes[name]["Weight"]))
    assert (by_weight[0], by_weight[-1]) == ("login", "alpha")


def test_slurm_conf_with_ipv6(cluster: Cluster, load: Callable[[str], Cluster]) -> None:
    old, new = (
        render_configs(load(CLUSTER.replace("192.168.8.151", '"fd00::5"')), slurm_version=release)[
            "slurm.conf"
        ]
        for release in ("22.05", "24.11")
    )
    assert nodes_of(old)["beta"]["NodeAddr"] == "fd00::5"
    assert (
        option(old, "CommunicationParameters")
        == option(new, "CommunicationParameters")
        == "EnableIPv6"
    )
    assert "enable_configless" in option(new, "SlurmctldParameters")
    assert "enable_configless" not in option(old, "SlurmctldParameters")
    assert "CommunicationParameters" not in render_configs(cluster)["slurm.conf"]


def test_weights_put_large_cards_last(load: Callable[[str], Cluster]) -> None:
    def order(*nodes: str) -> list[str]:
        items = "".join(f"  - {{cpus: 8, memory: 8G, {node}}}\n" for node in nodes)
        lines = nodes_of(render_configs(load(f"nodes:\n{items}"))["slurm.conf"])
        return sorted(lines, key=lambda name: int(lines[name]["Weight"]))

    small, many, big = (
        "name: a, gpus: 2, features: [vram24gb]",
        "name: b, gpus: 8",
        "name: c, gpus: 4, features: [vram80gb]",
    )
    assert order(big, f"{many}, features: [vram24gb]", small, "name: d, gpus: 0") == [
        "d",
        "a",
        "b",
        "c",
    ]
    assert order(big, many, small) == ["a", "c", "b"], "by count where one does not say its memory"
    fast = small.replace("vram24gb", "vram24gb, 100g, ib200gb")
    assert order(big, fast) == ["a", "c"], "a speed of the network is no memory"


def test_gres_conf_has_a_line_for_each_model(cluster: Cluster) -> None:
    lines = lines_of(render_configs(cluster)["gres.conf"])
    files = {(line["NodeName"], line.get("Type")): expand_hostlist(line["File"]) for line in lines}
    assert files == {
        ("gamma", "titan"): ["/dev/nvidia0"],
        ("beta", None): ["/dev/nvidia0", "/dev/nvidia1"],
        ("alpha", "a100"): ["/dev/nvidia0", "/dev/nvidia2", "/dev/nvidia3"],
        ("alpha", "v100"): ["/dev/nvidia1", "/dev/nvidia4"],
        ("amd[01-02]", "mi210"): ["/dev/dri/renderD128", "/dev/dri/renderD129"],
    }


def test_gres_conf_detects_mig_instances(load: Callable[[str], Cluster]) -> None:
    cluster = load(
        "nodes:\n"
        "  - name: a[1-2]\n"
        "    gpus: [{type: 1g.10gb, count: 7}, {type: a100, count: 1}]\n"
        "    cpus: 8\n    memory: 8G\n"
        "  - {name: b, gpus: {type: a100_3g.20gb, count: 2}, cpus: 8, memory: 8G}\n"
        "  - {name: c, gpus: {type: a100, count: 2}, cpus: 8, memory: 8G}\n"
    )
    files = render_configs(cluster)
    assert lines_of(files["gres.conf"]) == [
        {"NodeName": "a[1-2]", "AutoDetect": "nvml"},
        {"NodeName": "b", "AutoDetect": "nvml"},
        {"NodeName": "c", "Name": "gpu", "Type": "a100", "File": "/dev/nvidia[0-1]"},
    ]
    assert nodes_of(files["slurm.conf"])["a2"]["Gres"] == "gpu:1g.10gb:7,gpu:a100:1"
    in_lab = render_configs(cluster, installation=LAB)["gres.conf"]
    assert "AutoDetect" not in in_lab


def test_slurm_conf_partitions(cluster: Cluster, load: Callable[[str], Cluster]) -> None:
    def partitions(cluster: Cluster) -> dict[str, tuple[list[str], str]]:
        lines = [
            line
            for line in lines_of(render_configs(cluster)["slurm.conf"])
            if "PartitionName" in line
        ]
        return {
            line["PartitionName"]: (expand_hostlist(line["Nodes"]), line["Default"])
            for line in lines
        }

    everyone = [node.name for node in cluster.nodes]
    assert partitions(cluster) == {"all": (everyone, "YES"), "big": (["alpha"], "NO")}
    named = load(
        CLUSTER.replace("partition: big", "partition: a")
        .replace("memory: 30G", "memory: 30G, partition: b")
        .replace("memory: 60G", "memory: 60G, partition: b")
    )
    assert partitions(named) == {
        "b": (["gamma", "beta", "amd01", "amd02"], "YES"),
        "a": (["alpha"], "NO"),
        "all": (["login"], "NO"),
    }


def test_slurm_conf_of_the_lab(cluster: Cluster) -> None:
    files = render_configs(cluster, installation=LAB)
    conf = files["slurm.conf"]
    assert option(conf, "SlurmctldHost") == "controller(198.18.0.254)"
    assert option(conf, "AuthInfo").startswith("socket=/lab/munge")
    assert option(conf, "SlurmdParameters") == "config_overrides"
    assert option(conf, "ProctrackType") == "proctrack/linuxproc"
    assert {"bf_interval=1", "bf_hetjob_immediate"} <= set(
        option(conf, "SchedulerParameters").split(",")
    )
    assert nodes_of(conf)["beta"]["NodeAddr"] == "198.18.0.2"
    assert all(line["File"].startswith("/lab/dev/nvidia") for line in lines_of(files["gres.conf"]))


def test_slurmdbd_conf_goes_with_accounting(cluster: Cluster) -> None:
    without, with_database = render_configs(cluster), render_configs(cluster, slurmdbd=True)
    assert "AccountingStorage" not in without["slurm.conf"], (
        "AccountingStorageTRES without slurmdbd stops slurmctld"
    )
    assert option(without["slurm.conf"], "JobCompType") == "jobcomp/filetxt"
    assert (
        option(with_database["slurm.conf"], "AccountingStorageType")
        == "accounting_storage/slurmdbd"
    )
    assert option(with_database["slurm.conf"], "AccountingStorageTRES") == "gres/gpu"
    assert option(with_database["slurmdbd.conf"], "DbdHost") == "gamma"
    assert "slurmdbd.conf" not in without


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("cpus: 8, memory: 30G, features", "features"), "node 'gamma': no cpus and no memory"),
        (
            ("cores_per_socket: 8", "cores_per_socket: 9"),
            "2 sockets * 9 cores_per_socket * 2 threads_per_core = 36",
        ),
        (
            ("gpus: 2, cpus", "gpus: 129, cpus"),
            "node 'beta': 129 GPUs; a node can have at most 128",
        ),
        (
            ("partition: big", "partition: default"),
            "node 'alpha': a partition cannot be called 'default'",
        ),
        (("name: login", "name: DEFAULT"), "node 'DEFAULT': a node cannot be called 'DEFAULT'"),
    ],
)
def test_render_configs_refuses_impossible_nodes(
    load: Callable[[str], Cluster], change: tuple[str, str], message: str
) -> None:
    with pytest.raises(DdpSlurmError, match=re.escape(message)):
        render_configs(load(CLUSTER.replace(*change)))


@pytest.mark.parametrize("program", ["gpu_check", "/bin/a b", "/bin/x\nReturnToService=0"])
def test_health_check_must_be_a_full_path(cluster: Cluster, program: str) -> None:
    with pytest.raises(ConfigsError, match="expected the full path"):
        render_configs(cluster, health_check=program)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("19.05.5", "too old; 20.11 is the oldest supported"),
        ("27.02", "supported are 20.11, 21.08,"),
        ("22.5", "is not a Slurm version"),
        ("22.05\n", "is not a Slurm version"),
    ],
)
def test_slurm_release_refuses(version: str, message: str) -> None:
    with pytest.raises(SlurmReleaseError, match=message):
        slurm_release(version)


def test_write_configs_hides_the_database_file(cluster: Cluster, tmp_path: Path) -> None:
    files = render_configs(cluster, slurmdbd=True)
    folder = tmp_path / "new" / "etc"
    paths = write_configs(files, folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == files
    modes = {path.name: path.stat().st_mode & 0o777 for path in paths}
    assert modes == {
        "slurm.conf": 0o644,
        "gres.conf": 0o644,
        "cgroup.conf": 0o644,
        "slurmdbd.conf": 0o600,
    }
    (tmp_path / "file").touch()
    with pytest.raises(DdpSlurmError, match="file"):
        write_configs(files, tmp_path / "file")


def ddp_slurm(*words: str) -> str:
    command = [sys.executable, "-m", "ddp_slurm.cli", *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_configs_command_prints_or_writes(cluster: Cluster, tmp_path: Path) -> None:
    arguments = [
        "cluster",
        "configs",
        "--cluster",
        str(tmp_path / "cluster.yaml"),
        "--slurm-version",
        "24.11.5",
    ]
    printed = ddp_slurm(*arguments)
    files = render_configs(cluster, slurm_version="24.11")
    assert all(text in printed for text in files.values())
    written = ddp_slurm(*arguments, "--output", str(tmp_path / "conf"))
    assert written.split() == [str(tmp_path / "conf" / name) for name in files]
    assert {path.name: path.read_text() for path in (tmp_path / "conf").iterdir()} == files
