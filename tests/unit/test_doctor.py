"""The doctor as a whole, on recorded facts of three nodes."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddp_slurm.admin.doctor import ask as asking
from ddp_slurm.admin.doctor.checks import CHECKS, as_json, diagnose, exit_status, table
from ddp_slurm.admin.doctor.checks_training import is_served
from ddp_slurm.admin.doctor.finding import Finding, Severity
from ddp_slurm.admin.doctor.snapshot import Snapshot, look
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Node
from ddp_slurm.slurm_client.records import read_nodes
from ddp_slurm.ssh.command import RemoteError
from tests.doctor_facts import (
    CLUSTER,
    NODES_TEXT,
    errors_and_warnings,
    nodes_text,
    replaced,
    snapshot,
    training,
)

from .conftest import Stub


def test_doctor_finds_nothing_on_healthy_nodes() -> None:
    findings = diagnose(snapshot())
    assert [f for f in findings if f.severity is not Severity.OK] == []
    assert [f.check for f in findings] == list(CHECKS)
    assert exit_status(findings) == 0


def test_versions_ignore_pythons_patch_level() -> None:
    findings = diagnose(snapshot(beta={"training": training(python="3.11.9")}))
    assert exit_status(findings) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {
            "cgroup": ["tmpfs"],
            "cgroup_plugin": ["/usr/lib/slurm/cgroup_v1.so"],
            "cgroup_controllers": ["cpuset memory devices freezer"],
        },
        {  # 22.04's stock Slurm with proctrack/linuxproc
            "cgroup_plugin": ["/usr/lib/slurm/cgroup_v1.so"],
            "slurm.config": replaced("proctrack/cgroup", "proctrack/linuxproc"),
        },
        {"offset": ["400"]},  # the machine that asks has the wrong clock, not all of the others
        {"slurm.config": replaced("(null)", "config_overrides")}
        | nodes_text("RealMemory=30000", "RealMemory=99000"),
    ],
    ids=[
        "cgroup v1 without the v2 plugin",
        "no cgroups on v2",
        "the asking clock",
        "config_overrides",
    ],
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


@pytest.mark.parametrize(
    "state", ["IDLE+CLOUD+POWERED_DOWN", "DOWN+POWERING_DOWN", "IDLE+POWER", "IDLE~", "MIXED#"]
)
def test_reachable_accepts_nodes_in_power_saving(state: str) -> None:
    whole = snapshot(everywhere=nodes_text("State=IDLE", f"State={state}"))
    facts = {name: known for name, known in whole.facts.items() if name != "beta"}
    findings = diagnose(Snapshot(CLUSTER, facts, {"beta": "beta: no route to host"}, "alpha"))
    (finding,) = [f for f in findings if f.check == "reachable"]
    assert (finding.severity, finding.nodes) == (Severity.SKIPPED, ("beta",))
    assert state in finding.cause


@pytest.mark.parametrize("hostname", ["box7", "box7.lab.org"])
def test_host_name_may_be_the_node_host_name(hostname: str) -> None:
    records = nodes_text("NodeHostName=beta", "NodeHostName=box7")
    assert errors_and_warnings(snapshot(beta={"hostname": [hostname]}, everywhere=records)) == []


@pytest.mark.parametrize("hostname", ["beta", "beta.lab.org"])
def test_host_name_may_be_a_part_of_a_full_node_name(hostname: str) -> None:
    whole = snapshot(
        beta={"hostname": [hostname]},
        everywhere=nodes_text("NodeHostName=beta", "NodeHostName=beta.lab.org"),
    )
    assert [f for f in errors_and_warnings(whole) if f.check == "host name"] == []


def test_doctor_skips_slurms_checks_without_slurm() -> None:
    gone = (
        "slurmd.version",
        "slurm.ping",
        "slurm.config",
        "slurm.nodes",
        "slurm.partitions",
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
        "all-reduce",
    }
    assert {f.check for f in findings if f.severity > Severity.OK} == {"Slurm release"}


def test_munge_key_munged_running_nowhere_is_an_error() -> None:
    dead = Snapshot(
        CLUSTER, snapshot(everywhere={"unmunge": None, "munge_key": None}).facts, {}, None
    )
    (finding,) = [f for f in diagnose(dead) if f.check == "munge key"]
    assert (finding.severity, finding.nodes) == (Severity.ERROR, ("gamma", "beta", "alpha"))


def test_munge_key_reports_a_socket_without_permission() -> None:
    message = (
        'munge: Error: Failed to access "/run/munge/munge.socket.2": Permission denied '
        "(Did you start munged?)"
    )
    refused = snapshot(everywhere={"unmunge": None, "credential!": f"6 {message}"})
    findings = diagnose(Snapshot(CLUSTER, refused.facts, {}, None))
    reports = [f for f in findings if f.check == "munge key"]
    assert [f.nodes for f in reports] == [("gamma",), ("beta",), ("alpha",)]
    assert all("no permission" in f.cause and "chmod 0755 /run/munge" in f.fix for f in reports)


def test_table_and_json_report_the_same() -> None:
    findings = diagnose(snapshot(beta={"hostname": ["ubuntu"]}))
    lines = table(findings).splitlines()
    assert len(lines) == len(CHECKS)
    (line,) = [line for line in lines if line.startswith("error")]
    assert line.split()[:4] == ["error", "host", "name", "beta"]
    assert " -> on it: hostnamectl set-hostname beta" in line
    printed = json.loads(json.dumps(as_json(findings)))
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
    assert exit_status([Finding(severity) for severity in severities]) == status


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


@pytest.mark.parametrize(
    ("messages", "is_slurms"),
    [
        ("srun: error: alpha: task 0: Exited with exit code 3", False),
        ("no such card\nsrun: error: alpha: task 0: Killed", False),
        ("srun: error: Unable to allocate resources: Requested nodes are busy", True),
        ("srun: error: Node failure on alpha\nsrun: error: alpha: task 0: Killed", True),
    ],
)
def test_srun_failure_of_a_command_is_not_slurms(
    stub: Stub, messages: str, is_slurms: bool
) -> None:
    stub("srun", f"echo '{messages}' >&2; exit 3")
    node = Node("alpha")
    if is_slurms:
        with pytest.raises(RemoteError, match=r"alpha: srun: error: (Unable|Node)"):
            asking.run_by_srun(node, ["true"])
    else:
        assert asking.run_by_srun(node, ["true"]).status == 3


def test_ok_names_the_nodes_that_answered_where_one_is_silent() -> None:
    facts = {name: known for name, known in snapshot().facts.items() if name != "beta"}
    rows = table(diagnose(Snapshot(CLUSTER, facts, {"beta": "beta: timed out"}, "alpha")))
    assert "ok       disks              gamma,alpha\n" in rows
    all_silent = diagnose(Snapshot(CLUSTER, {}, dict.fromkeys(("gamma", "beta", "alpha"), "off")))
    assert not [finding for finding in all_silent if finding.severity is Severity.OK]
