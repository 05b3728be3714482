"""Each check of the doctor on recorded facts: three healthy nodes, and one error at a time."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ddp_slurm.admin import doctor
from ddp_slurm.admin.doctor import CHECKS, Finding, Severity, Snapshot, diagnose, look
from ddp_slurm.admin.doctor import ask as asking
from ddp_slurm.admin.doctor.checks_training import is_served
from ddp_slurm.admin.facts import Block, Facts
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster, GpuModel, Node
from ddp_slurm.slurm_client.records import read_nodes
from ddp_slurm.ssh.command import RemoteError

NODES = (
    Node(
        "gamma",
        gpus=(GpuModel(type="titan"),),
        cpus=8,
        memory_mb=30000,
        sockets=1,
        cores_per_socket=4,
    ),
    Node("beta", gpus=(GpuModel(type="v100", count=2),), cpus=8, memory_mb=30000),
    Node("alpha", gpus=(GpuModel(type="a100", count=2),), cpus=8, memory_mb=30000),
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
TRAINING = {
    "python": "3.11.4",
    "torch": "2.6.0+cu124",
    "cuda": "12.4",
    "cudnn": "90100",
    "nccl": "2.21.5",
    "architectures": "sm_50 sm_70 sm_80 sm_90 compute_90",
}


def healthy(name: str) -> dict[str, list[str] | str]:
    """Facts by key; a text is a block with status 0, a list are fact lines."""
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
        "offset": ["0"],
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
    for key in [
        key for key in values if key.endswith("!")
    ]:  # a failing command: "name!" holds "status text"
        status, _, text = str(values[key]).partition(" ")
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
    return Snapshot(CLUSTER, facts, credential_from="alpha")


def replaced(old: str, new: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return edit


def training(**values: str) -> str:
    return "facts " + json.dumps(TRAINING | values)


def test_doctor_finds_nothing_on_healthy_nodes() -> None:
    findings = diagnose(snapshot())
    assert [f for f in findings if f.severity is not Severity.OK] == []
    assert [f.check for f in findings] == list(CHECKS)
    assert doctor.exit_status(findings) == 0


E, W, S = Severity.ERROR, Severity.WARNING, Severity.SKIPPED
NODES_TEXT = healthy("alpha")["slurm.nodes"]
assert isinstance(NODES_TEXT, str)


def nodes_text(old: str, new: str, name: str = "beta") -> dict[str, object]:
    lines = [
        line.replace(old, new) if f"NodeName={name} " in line else line
        for line in NODES_TEXT.splitlines()
    ]
    return {"slurm.nodes": "\n".join(lines)}


ERRORS: list[tuple[str, Severity, tuple[str, ...], str, dict[str, dict[str, object]]]] = [
    (
        "Slurm release",
        E,
        ("beta",),
        r"21\.08\.5 on beta",
        {
            "beta": {"slurmd.version": "slurm-wlm 21.08.5"},
            "everywhere": nodes_text("22.05.8", "21.08.5"),
        },
    ),
    (
        "Slurm release",
        W,
        ("beta",),
        r"22\.05\.2 on beta",
        {
            "beta": {"slurmd.version": "slurm-wlm 22.05.2"},
            "everywhere": nodes_text("22.05.8", "22.05.2"),
        },
    ),
    ("Slurm release", W, ("beta",), "still runs", {"everywhere": nodes_text("22.05.8", "22.05.2")}),
    (
        "Slurm release",
        E,
        ("beta",),
        "not installed",
        {"beta": {"slurmd.version": None}, "everywhere": nodes_text("Version=22.05.8 ", "")},
    ),
    (
        "cgroup plugin",
        E,
        ("beta",),
        "cgroup_v2.so",
        {"beta": {"cgroup_plugin": ["/usr/lib/slurm/cgroup_v1.so"]}},
    ),
    (
        "hardware",
        E,
        ("gamma",),
        "cluster.yaml has 30000 MiB of memory, the machine 15625",
        {"gamma": {"memory_kib": ["16000000"]}},
    ),
    (
        "hardware",
        E,
        ("beta",),
        "slurm.conf has 99000 MiB",
        {"everywhere": nodes_text("RealMemory=30000", "RealMemory=99000")},
    ),
    (
        "hardware",
        E,
        ("beta",),
        "slurm.conf has 8 cores, the machine 4",
        {"everywhere": nodes_text("Sockets=1", "Sockets=2")},
    ),
    (
        "hardware",
        E,
        ("alpha",),
        "slurm.conf has 8 CPUs, the machine 4",
        {"alpha": {"cpu": ["0 0", "0 1", "0 2", "0 3"]}},
    ),
    (
        "GPU count",
        E,
        ("beta",),
        "cluster.yaml has 2 GPUs, nvidia-smi shows 1",
        {"beta": {"nvidia-smi": lambda text: text.splitlines()[0]}},
    ),
    (
        "GPU count",
        E,
        ("beta",),
        "slurm.conf has 3 GPUs",
        {"everywhere": nodes_text("gpu:2", "gpu:v100:3(S:0)")},
    ),
    (
        "GPU count",
        W,
        ("gamma",),
        "slurm.conf has 1 GPUs, nvidia-smi shows 2",
        {"gamma": {"nvidia-smi": healthy("alpha")["nvidia-smi"]}},
    ),
    ("GPU count", E, ("beta",), "no nvidia-smi", {"beta": {"nvidia-smi": None}}),
    (
        "munge key",
        E,
        ("beta",),
        "another munge key than alpha",
        {"beta": {"unmunge!": "15 unmunge: Error: Invalid credential"}},
    ),
    (
        "munge key",
        E,
        ("beta",),
        "munged is not running",
        {
            "beta": {
                "unmunge!": '6 unmunge: Error: Failed to access "/run/munge/munge.socket.2": '
                "No such file or directory"
            }
        },
    ),
    ("munge key", E, ("beta",), "mode 440", {"beta": {"munge_key": ["440 munge 1024"]}}),
    ("clock", E, ("beta",), "400 s behind", {"beta": {"offset": ["-400"]}}),
    ("clock", W, ("beta",), "8 s ahead of", {"beta": {"offset": ["8"]}}),
    (
        "clock",
        E,
        ("beta",),
        "Rewound credential",
        {"beta": {"unmunge!": "16 unmunge: Error: Rewound credential"}},
    ),
    (
        "users",
        E,
        ("beta",),
        "slurm has different ids",
        {"beta": {"users": replaced("slurm:x:64030", "slurm:x:118")}},
    ),
    (
        "users",
        E,
        ("beta",),
        "slurm .* does not exist",
        {"beta": {"users": replaced("slurm:", "slorm:")}},
    ),
    ("users", W, ("beta",), "ann .* does not exist", {"beta": {"users": replaced("ann:", "bob:")}}),
    (
        "firewall",
        E,
        ("alpha",),
        r"beta gets no answer from alpha on port 29500 .*, 6817 \(slurmctld\)",
        {"beta": {"port": ["alpha 6817 silent", "alpha 29500 unreachable"]}},
    ),
    (
        "GPU driver",
        E,
        ("beta",),
        "Driver/library version mismatch",
        {
            "beta": {
                "nvidia-smi!": "18 Failed to initialize NVML: Driver/library version mismatch\n"
                "NVML library version: 550.54"
            }
        },
    ),
    (
        "GPU driver",
        E,
        ("beta",),
        r"kernel module 535\.171\.04, library 535\.183\.01",
        {"beta": {"nvidia.module": replaced("535.183.01", "535.171.04")}},
    ),
    ("host name", E, ("beta",), "'ubuntu'", {"beta": {"hostname": ["ubuntu.example"]}}),
    (
        "name resolution",
        E,
        ("beta",),
        r"beta is 127\.0\.1\.1 here",
        {"beta": {"resolves": ["beta 127.0.1.1"]}},
    ),
    (
        "name resolution",
        W,
        ("beta",),
        "alpha has different addresses",
        {"beta": {"resolves": ["alpha 10.9.9.9", "beta 10.0.0.2"]}},
    ),
    (
        "configuration",
        E,
        ("beta",),
        "differs from the one",
        {"beta": {"slurm.config": replaced("Match", "Different Ours=0x1 Slurmctld=0x2")}},
    ),
    (
        "configuration",
        W,
        ("beta",),
        "/run/slurm/conf/slurm.conf is not the same",
        {"beta": {"config_file": ["/run/slurm/conf/slurm.conf 9 9"]}},
    ),
    (
        "slurmctld",
        E,
        ("alpha",),
        "does not respond to any node",
        {"everywhere": {"slurm.ping!": "1 Slurmctld(primary) at alpha is DOWN"}},
    ),
    (
        "slurmctld",
        E,
        ("beta",),
        "slurmctld does not respond: ",
        {"beta": {"slurm.ping!": "1 Slurmctld(primary) at alpha is DOWN"}},
    ),
    (
        "node states",
        E,
        ("beta",),
        "Low RealMemory",
        {
            "everywhere": nodes_text(
                "State=IDLE ThreadsPerCore=2 TmpDisk=0 Partitions=all",
                "State=IDLE+DRAIN ThreadsPerCore=2 TmpDisk=0 Partitions=all Reason=Low RealMemory "
                "(reported:15625 < 100.00% of configured:30000) [slurm@2026-01-01T00:00:00]",
            )
        },
    ),
    (
        "node states",
        E,
        ("beta",),
        r"DOWN\*",
        {"everywhere": nodes_text("State=IDLE", "State=DOWN*")},
    ),
    (
        "torch",
        E,
        ("beta",),
        "No module named 'torch'",
        {
            "beta": {
                "training": 'facts {"python": "3.11.4", '
                '"torch_error": "ModuleNotFoundError: No module named \'torch\'"}'
            }
        },
    ),
    (
        "torch",
        W,
        ("gamma", "beta", "alpha"),
        "No module named",
        {
            "everywhere": {
                "training": 'facts {"python": "3.11.4", "torch_error": "No module named"}'
            }
        },
    ),
    ("torch", E, ("beta",), "python3 does not run", {"beta": {"training": None}}),
    (
        "torch",
        W,
        ("gamma", "beta", "alpha"),
        "python3 does not run",
        {"everywhere": {"training": None}},
    ),
    (
        "versions",
        E,
        ("beta",),
        r"different NCCL: 2\.21\.5 on gamma, alpha, 2\.19\.3 on beta",
        {"beta": {"training": training(nccl="2.19.3")}},
    ),
    (
        "versions",
        E,
        ("gamma",),
        "different torch",
        {"gamma": {"training": training(torch="2.5.1+cu124")}},
    ),
    (
        "versions",
        E,
        ("gamma",),
        "different Python: 3.10 on gamma",
        {"gamma": {"training": training(python="3.10.12")}},
    ),
    (
        "driver branch",
        W,
        ("gamma",),
        "550 on gamma",
        {"gamma": {"nvidia-smi": replaced("535.183.01", "550.54.15"), "nvidia.module": None}},
    ),
    (
        "cards served",
        E,
        ("gamma",),
        r"torch 2\.8\S* has no code for NVIDIA TITAN V \(compute capability 7\.0\)",
        {
            "gamma": {
                "training": training(
                    torch="2.8.0+cu128", architectures="sm_75 sm_80 sm_90 compute_90"
                )
            }
        },
    ),
    (
        "glibc",
        W,
        ("gamma",),
        r"glibc 2\.27; .*2\.7",
        {"gamma": {"libc": ["glibc 2.27"], "os": ["ubuntu-18.04"]}},
    ),
]


@pytest.mark.parametrize(("check", "severity", "nodes", "cause", "changes"), ERRORS)
def test_doctor_names_node_cause_and_fix(
    check: str,
    severity: Severity,
    nodes: tuple[str, ...],
    cause: str,
    changes: dict[str, dict[str, object]],
) -> None:
    findings = [f for f in diagnose(snapshot(**changes)) if f.severity > Severity.OK]
    hits = [f for f in findings if f.check == check and re.search(cause, f.cause)]
    assert [(f.severity, f.nodes) for f in hits] == [(severity, nodes)], findings
    assert hits[0].fix


def test_versions_ignore_pythons_patch_level() -> None:
    findings = diagnose(snapshot(beta={"training": training(python="3.11.9")}))
    assert doctor.exit_status(findings) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"cgroup": ["tmpfs"], "cgroup_plugin": ["/usr/lib/slurm/cgroup_v1.so"]},
        {"offset": ["400"]},  # the machine that asks has the wrong clock, not all of the others
        {"slurm.config": replaced("(null)", "config_overrides")}
        | nodes_text("RealMemory=30000", "RealMemory=99000"),
    ],
    ids=["cgroup v1 without the v2 plugin", "the asking clock", "config_overrides"],
)
def test_doctor_ignores_harmless_differences(changes: dict[str, object]) -> None:
    assert [
        f for f in diagnose(snapshot(everywhere=changes)) if f.severity is not Severity.OK
    ] == []


def test_node_states_drain_by_administrator_is_a_warning() -> None:
    text = nodes_text("State=IDLE", "State=IDLE+DRAIN")["slurm.nodes"]
    reason = str(text).replace(
        "Partitions=all", "Partitions=all Reason=new fan [ann@2026-01-01T00:00:00]", 2
    )
    findings = [
        f
        for f in diagnose(snapshot(everywhere={"slurm.nodes": reason}))
        if f.severity > Severity.OK
    ]
    assert [(f.check, f.severity, f.nodes, f.cause) for f in findings] == [
        ("node states", Severity.WARNING, ("beta",), "IDLE+DRAIN: new fan (by ann)")
    ]


def test_reachable_reports_only_the_silent_node() -> None:
    whole = snapshot()
    facts = {name: known for name, known in whole.facts.items() if name != "beta"}
    broken = Snapshot(
        CLUSTER, facts, {"beta": "beta: cannot be reached by ssh: timed out"}, "alpha"
    )
    findings = [f for f in diagnose(broken) if f.severity > Severity.OK]
    assert [(f.check, f.nodes, f.cause) for f in findings] == [
        ("reachable", ("beta",), "cannot be reached by ssh: timed out")
    ]


def test_doctor_skips_slurms_checks_without_slurm() -> None:
    gone = (
        "slurmd.version",
        "slurm.ping",
        "slurm.config",
        "slurm.nodes",
        "unmunge",
        "munge_key",
        "munged",
        "config_file",
    )
    bare = snapshot(everywhere=dict.fromkeys(gone))
    findings = diagnose(Snapshot(CLUSTER, bare.facts, {}, None))
    assert {f.check for f in findings if f.severity is Severity.SKIPPED} == {
        "slurmctld",
        "node states",
        "munge key",
    }
    assert {f.check for f in findings if f.severity > Severity.OK} == {"Slurm release"}


def test_munge_key_munged_running_nowhere_is_an_error() -> None:
    dead = Snapshot(
        CLUSTER, snapshot(everywhere={"unmunge": None, "munge_key": None}).facts, {}, None
    )
    (finding,) = [f for f in diagnose(dead) if f.check == "munge key"]
    assert (finding.severity, finding.nodes) == (Severity.ERROR, ("gamma", "beta", "alpha"))


def test_table_and_json_report_the_same() -> None:
    findings = diagnose(snapshot(beta={"hostname": ["ubuntu"]}))
    lines = doctor.table(findings).splitlines()
    assert len(lines) == len(CHECKS)
    (line,) = [line for line in lines if line.startswith("error")]
    assert line.split()[:4] == ["error", "host", "name", "beta"]
    assert " -> on it: hostnamectl set-hostname beta" in line
    printed = json.loads(json.dumps(doctor.as_json(findings)))
    assert printed["status"] == 2
    assert [f for f in printed["findings"] if f["severity"] != "ok"] == [
        {
            "check": "host name",
            "severity": "error",
            "nodes": ["beta"],
            "cause": "the machine's host name is 'ubuntu', which is not in slurm.conf",
            "fix": "on it: hostnamectl set-hostname beta, then restart slurmd",
        }
    ]


@pytest.mark.parametrize(
    ("severities", "status"),
    [
        ((Severity.OK, Severity.SKIPPED), 0),
        ((Severity.OK, Severity.WARNING), 1),
        ((Severity.ERROR, Severity.WARNING), 2),
    ],
)
def test_exit_status_is_that_of_the_worst_finding(
    severities: Sequence[Severity], status: int
) -> None:
    assert doctor.exit_status([Finding(severity) for severity in severities]) == status


@pytest.mark.parametrize(
    ("capability", "built", "served"),
    [
        ("6.1", "sm_50 sm_60", True),
        ("6.0", "sm_61", False),
        ("8.9", "sm_80 sm_90", True),
        ("12.0", "sm_80 sm_90", False),
        ("12.0", "sm_90 compute_90", True),
        ("7.0", "sm_75 compute_90", False),
        ("10.3", "sm_100 sm_120", True),
        ("9.0", "sm_90a", True),
    ],
)
def test_is_served_follows_binary_compatibility(capability: str, built: str, served: bool) -> None:
    assert is_served(capability, built.split()) is served


def test_cluster_to_ask_is_slurms_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\ncat <<'E'\n{NODES_TEXT}\nE\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    cluster = asking.cluster_to_ask(None)
    assert [(n.name, n.address, n.gpu_count) for n in cluster.nodes] == [
        ("gamma", "10.0.0.1", 1),
        ("beta", "10.0.0.1", 2),
        ("alpha", "10.0.0.1", 2),
    ]
    assert read_nodes(NODES_TEXT)[0].real_memory_mb == 30000
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(asking.DoctorError, match="--cluster FILE"):
        asking.cluster_to_ask(None)
    with pytest.raises(asking.DoctorError, match="'telnet' does not exist"):
        asking.runner_of("telnet")


def test_credential_comes_from_the_first_able_node() -> None:
    asked: list[tuple[str, str]] = []

    def runner(
        node: Node, argv: object, *, input: bytes | None = None, timeout_seconds: float = 0
    ) -> Answer:
        text = (input or b"").decode()
        asked.append(
            (
                node.name,
                "credential"
                if text.startswith("{\nDEPTH=credential")
                else text.split("CREDENTIAL=")[1].split("\n")[0],
            )
        )
        if node.name == "alpha":
            raise RemoteError("alpha: off")
        return Answer(0, "facts begin\nblock credential 0\n|MUNGE:AwQ=:\nfacts end\n", "")

    seen = look(CLUSTER, runner=runner)
    assert asked[:2] == [("alpha", "credential"), ("gamma", "credential")]
    assert ("beta", "MUNGE:AwQ=:") in asked
    assert (seen.credential_from, list(seen.unreachable)) == ("gamma", ["alpha"])
