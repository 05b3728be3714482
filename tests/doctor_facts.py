"""Recorded facts of three healthy nodes, to be changed by the doctor's tests."""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from ddp_slurm.admin.doctor.checks import diagnose
from ddp_slurm.admin.doctor.finding import Finding, Severity
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.admin.facts import Block, Facts
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster, GpuModel, Node

NODES = (
    Node(
        "gamma",
        gpus=(GpuModel(type="titan"),),
        cpus=8,
        memory_mb=30000,
        sockets=1,
        cores_per_socket=4,
        interface="eno1",
    ),
    Node(
        "beta",
        gpus=(GpuModel(type="v100", count=2),),
        cpus=8,
        memory_mb=30000,
        interface="eno1",
    ),
    Node(
        "alpha",
        gpus=(GpuModel(type="a100", count=2),),
        cpus=8,
        memory_mb=30000,
        interface="eno1",
    ),
)
CLUSTER = Cluster("lab", NODES, controller="alpha")
CARDS = {
    "gamma": ("NVIDIA TITAN V", "7.0", 1),
    "beta": ("Tesla V100-SXM2-32GB", "7.0", 2),
    "alpha": ("NVIDIA A100-SXM4-80GB", "8.0", 2),
}
PASSWD = """\
root:x:0:0::/root:/bin/bash
munge:x:64031:64031::/:/usr/sbin/nologin
slurm:x:64030:64030::/:/usr/sbin/nologin
ann:x:1000:1000::/home/ann:/bin/bash"""
SLURM_NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=4 CPUAlloc=0 CPUTot=8 CPULoad=0.1 "
    "AvailableFeatures=(null) Gres=gpu:{gpus} NodeAddr=10.0.0.1 NodeHostName={name} "
    "Version=22.05.8 OS=Linux 5.15.0 #1 SMP RealMemory=30000 AllocMem=0 Sockets=1 "
    "Boards=1 State=IDLE ThreadsPerCore=2 TmpDisk=0 Partitions=all"
)
CONFIG = """\
Configuration data as of now
HASH_VAL                = Match
ProctrackType           = proctrack/cgroup
SlurmdParameters        = (null)"""
DISKS = """\
Filesystem     1024-blocks     Used Available Capacity Mounted on
/dev/sda2        100000000 98000000   2000000      98% /
tmpfs             10000000        0  10000000       0% /dev/shm"""
PROOF = Answer(0, "all-reduce over 5 ranks with nccl: 1.10 GB/s on each link\n", "")
TRAINING = {
    "python": "3.11.4",
    "torch": "2.6.0+cu124",
    "cuda": "12.4",
    "cudnn": "90100",
    "nccl": "2.21.5",
    "ddp_slurm": "0.1",
    "architectures": "sm_50 sm_70 sm_80 sm_90 compute_90",
}


def healthy(name: str) -> dict[str, list[str] | str]:
    """Facts by key: a list has fact lines, a text is the output of a command that succeeded.

    A key that ends in "!" has the exit status and the output of one that failed.
    """
    card, capability, count = CARDS[name]
    others = [other for other in CARDS if other != name]
    return {
        "hostname": [name],
        "os": ["ubuntu-22.04"],
        "libc": ["glibc 2.35"],
        "memory_kib": [str(32768 * 1024)],
        "cpu": [f"0 {core}" for core in range(4) for _ in range(2)],
        "munge_key": ["400 munge 1024"],
        "munged": ["/usr/sbin/munged"],
        "cgroup": ["cgroup2fs"],
        "cgroup_plugin": ["/usr/lib/x86_64-linux-gnu/slurm-wlm/cgroup_v2.so"],
        "config_file": ["/run/slurm/conf/slurm.conf 123 456"],
        "cgroup_controllers": ["cpuset cpu io memory pids"],
        "device": [f"/dev/nvidia{i}" for i in range(count)],
        "gres.conf": "NodeName=beta,alpha Name=gpu File=/dev/nvidia[0-1]\n"
        "NodeName=gamma Name=gpu Type=titan File=/dev/nvidia0",
        "slurmd.limits": "Max open files            131072               131072       files",
        "slurm.partitions": "PartitionName=all\n   Default=YES State=UP TotalNodes=3",
        "offset": ["0"],
        "slurmd_runs": ["yes"],
        "interface": ["lo unknown -1", "eno1 up 1000"],
        "mtu": ["lo 65536", "eno1 1500"],
        "disks": DISKS,
        "port": [
            f"{other} {port} {'open' if port == 6818 else 'refused'}"
            for other in others
            for port in (6817, 6818, 29500)
        ],
        "resolves": [f"{other} 10.0.0.{list(CARDS).index(other) + 1}" for other in CARDS],
        "nvidia-smi": "\n".join(
            f"{i}, 00000000:0{i}:00.0, 32768, 535.183.01, {card}" for i in range(count)
        ),
        "nvidia-smi.capability": "\n".join(f"{i}, {capability}" for i in range(count)),
        "nvidia.module": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12",
        "slurmd.version": "slurm-wlm 22.05.8",
        "slurm.ping": "Slurmctld(primary) at alpha is UP",
        "slurm.config": CONFIG,
        "slurm.nodes": "\n".join(SLURM_NODE.format(name=n, gpus=CARDS[n][2]) for n in CARDS),
        "users": PASSWD,
        "unmunge": "STATUS:           Success (0)",
        "training": "facts " + json.dumps(TRAINING),
    }


def facts_of(values: dict[str, list[str] | str]) -> Facts:
    lines = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    blocks = {key: (Block(0, value),) for key, value in values.items() if isinstance(value, str)}
    for key, value in values.items():
        if key.endswith("!"):  # a failing command
            status, _, text = str(value).partition(" ")
            blocks[key[:-1]] = (Block(int(status), text),)
    return Facts(lines, blocks, float(lines["offset"][0]), 0.5)


def snapshot(**changes: dict[str, object]) -> Snapshot:
    """The healthy cluster, changed: ``beta={"key": value}``.

    None removes a key, a callable edits its value.
    """
    facts = {}
    for name in CARDS:
        values = healthy(name)
        for key, change in {**changes.get("everywhere", {}), **changes.get(name, {})}.items():
            if change is None:
                values.pop(key, None)
            else:
                values[key] = change(values[key]) if callable(change) else change  # type: ignore[assignment]
        facts[name] = facts_of(values)
    return Snapshot(CLUSTER, facts, credential_from="alpha", proof=PROOF)


def replaced(old: str, new: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return edit


def training(**values: str) -> str:
    return "facts " + json.dumps(TRAINING | values)


NODES_TEXT = str(healthy("alpha")["slurm.nodes"])


def nodes_text(old: str, new: str, name: str = "beta") -> dict[str, object]:
    """The change of a node's record in Slurm, for all nodes that ask."""
    lines = [
        line.replace(old, new) if f"NodeName={name} " in line else line
        for line in NODES_TEXT.splitlines()
    ]
    return {"slurm.nodes": "\n".join(lines)}


class Case(NamedTuple):
    """An error planted in some facts, and what the doctor reports."""

    check: str
    severity: Severity
    nodes: tuple[str, ...]
    cause: str
    changes: dict[str, dict[str, object]]

    def __str__(self) -> str:
        return f"{self.check}: {self.cause}"[:60]


def case(
    check: str,
    severity: Severity,
    nodes: str | tuple[str, ...],
    cause: str,
    **changes: dict[str, object],
) -> Case:
    return Case(check, severity, (nodes,) if isinstance(nodes, str) else nodes, cause, changes)


def errors_and_warnings(seen: Snapshot) -> list[Finding]:
    return [finding for finding in diagnose(seen) if finding.severity > Severity.OK]


def assert_found(case: Case) -> None:
    """The doctor reports the error once, on its nodes, with a fix."""
    findings = errors_and_warnings(snapshot(**case.changes))
    hits = [f for f in findings if f.check == case.check and re.search(case.cause, f.cause)]
    assert [(f.severity, f.nodes) for f in hits] == [(case.severity, case.nodes)], findings
    assert hits[0].fix
