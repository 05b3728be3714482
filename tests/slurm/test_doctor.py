"""Each of the most common set-up errors, planted in one node of a running lab, is found there.

Clock, driver, GPUs and the daemon's version are planted through a stub of the tool that reports
them: the hosts of a lab share one machine. The rest is real: another key, another user file, a
packet filter, another configuration.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_slurm.admin.doctor.ask import prove, run_by_srun
from ddp_slurm.admin.doctor.checks import diagnose
from ddp_slurm.admin.doctor.checks_training import all_reduce
from ddp_slurm.admin.doctor.finding import Finding, Severity
from ddp_slurm.admin.doctor.snapshot import Snapshot, look
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster, GpuModel, Node
from ddp_slurm.lab import Lab
from ddp_slurm.ssh.command import RemoteError
from tests.slurm.conftest import wait_for_node
from tests.waiting import wait_until

CLUSTER = """\
name: lab
nodes:
  - {name: gamma, gpus: {type: titan, count: 1}, cpus: 2, memory: 900M}
  - {name: beta, gpus: {type: v100, count: 2}, cpus: 2, memory: 900M}
  - {name: alpha, gpus: {type: a100, count: 4}, cpus: 2, memory: 900M}
"""
NVIDIA_SMI = """case $1 in *driver_version*) ;; *) exit 2 ;; esac
case $(uname -n) in gamma) last=0 ;; alpha) last=3 ;; *) last={beta_last} ;; esac
for i in $(seq 0 $last); do echo "$i, 00000000:0$i:00.0, 32768, 535.183.01, NVIDIA A100"; done"""
PYTHON = "facts " + json.dumps(
    {"python": "3.11.4", "torch": "2.6.0", "cuda": "12.4", "cudnn": "90100", "nccl": "2.21.5"}
)
RANKS = ("0 on gamma", "1 on beta", "2 on beta")
GPU_CHECK = Path(__file__).parents[2] / "cluster_setup" / "gpu_check.sh"
IN_OWN_MOUNTS = ["unshare", "--mount", "--", "sh", "-euc"]


class Patient:
    """The lab, with ``before``: the words that go before each command on beta."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.cluster = Cluster.load(folder / "cluster.yaml")
        self.before: list[str] = []
        self.tools = self.stub("tools", "nvidia-smi", NVIDIA_SMI.format(beta_last=1))
        self.stub("tools", "python", f"echo {shlex.quote(PYTHON)}")

    def stub(self, folder: str, name: str, body: str) -> Path:
        """A folder that has a tool of this name; it goes before the others on PATH."""
        path = self.folder / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path.parent

    def run(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        input: bytes | None = None,
        timeout_seconds: float = 60,
    ) -> Answer:
        before = [
            "env",
            f"PATH={self.tools}:{os.environ['PATH']}:/usr/sbin",
            *(self.before if node.name == "beta" else []),
        ]
        done = self.lab.exec(
            node.name, [*before, *argv], input=input, capture_output=True, timeout=timeout_seconds
        )
        return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())

    def findings(self) -> list[Finding]:
        seen = look(self.cluster, python=str(self.tools / "python"), runner=self.run)
        return [finding for finding in diagnose(seen) if finding.severity > Severity.OK]


@pytest.fixture(scope="module")
def lab(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    file = tmp_path_factory.mktemp("doctor") / "cluster.yaml"
    file.write_text(CLUSTER)
    with Lab.up(Cluster.load(file), f"test-{os.getpid()}-doctor") as running:
        yield running


@pytest.fixture
def patient(lab: Lab, tmp_path: Path) -> Patient:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return Patient(lab, tmp_path)


def path_before(patient: Patient, folder: Path) -> list[str]:
    return ["env", f"PATH={folder}:{patient.tools}:{os.environ['PATH']}:/usr/sbin"]


@contextlib.contextmanager
def version_skew(patient: Patient) -> Iterator[None]:
    patient.before = path_before(patient, patient.stub("old", "slurmd", "echo slurm-wlm 21.08.5"))
    yield


@contextlib.contextmanager
def no_cgroup_plugin(patient: Patient) -> Iterator[None]:
    (plugins,) = [
        path for path in Path("/usr/lib").glob("*/slurm-wlm") if (path / "cgroup_v2.so").exists()
    ]
    poorer = patient.folder / "plugins"
    shutil.copytree(plugins, poorer)
    (poorer / "cgroup_v2.so").unlink()
    mounts = f'mount -t cgroup2 none /sys/fs/cgroup; mount --bind {poorer} {plugins}; exec "$@"'
    not_running = path_before(patient, patient.stub("no_slurmd", "pidof", "exit 1"))
    patient.before = [*not_running, *IN_OWN_MOUNTS, mounts, "sh"]
    yield


@contextlib.contextmanager
def memory_overstated(patient: Patient) -> Iterator[None]:
    nodes = [
        n._replace(memory_mb=2_000_000) if n.name == "beta" else n for n in patient.cluster.nodes
    ]
    patient.cluster = replace(patient.cluster, nodes=tuple(nodes))
    yield


@contextlib.contextmanager
def gpu_missing(patient: Patient) -> Iterator[None]:
    patient.before = path_before(
        patient, patient.stub("one_gpu", "nvidia-smi", NVIDIA_SMI.format(beta_last=0))
    )
    yield


@contextlib.contextmanager
def another_munge_key(patient: Patient) -> Iterator[None]:
    key, socket, pid = (patient.folder / name for name in ("key", "socket", "pid"))
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = [
        f"--socket={socket}",
        f"--pid-file={pid}",
        f"--seed-file={patient.folder}/seed",
        f"--log-file={patient.folder}/log",
    ]
    munged = subprocess.Popen(
        ["munged", "--foreground", "--force", f"--key-file={key}", *files],
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while subprocess.run(["munge", "-n", f"--socket={socket}"], capture_output=True).returncode:
            assert time.monotonic() < deadline
            assert munged.poll() is None
        patient.before = path_before(
            patient,
            patient.stub("other_key", "unmunge", f"exec /usr/bin/unmunge --socket={socket}"),
        )
        yield
    finally:
        munged.terminate()
        munged.wait()


@contextlib.contextmanager
def clock_off(patient: Patient) -> Iterator[None]:
    body = 'exec /bin/date -d "@$(($(/bin/date +%s) + 400))" "$@"'
    patient.before = path_before(patient, patient.stub("clock", "date", body))
    yield


@contextlib.contextmanager
def another_uid(patient: Patient) -> Iterator[None]:
    users = patient.folder / "passwd"
    lines = Path("/etc/passwd").read_text().splitlines()
    others = [line for line in lines if not line.startswith("munge:")]
    users.write_text(
        "\n".join([*others, "munge:x:4711:4711::/nonexistent:/usr/sbin/nologin"]) + "\n"
    )
    patient.before = [*IN_OWN_MOUNTS, f'mount --bind {users} /etc/passwd; exec "$@"', "sh"]
    yield


@contextlib.contextmanager
def firewall(patient: Patient) -> Iterator[None]:
    """beta drops packets to port 6818: a BPF program, as netfilter's tools may be missing."""
    words = "6,48 0 0 23,21 0 3 6,40 0 0 36,21 0 1 6818,6 0 0 2,6 0 0 4294967295"
    links = patient.lab.exec(
        "beta", ["ls", "/sys/class/net"], capture_output=True, text=True
    ).stdout.split()
    (link,) = [link for link in links if link != "lo"]
    patient.lab.exec("beta", ["tc", "qdisc", "add", "dev", link, "clsact"], check=True)
    try:
        drop = ["tc", "filter", "add", "dev", link, "ingress", "bpf", "da", "bytecode", words]
        if patient.lab.exec("beta", drop, capture_output=True).returncode:
            pytest.skip("this kernel has no packet filter that tc can load (cls_bpf)")
        wait_for_node(patient.lab, "beta", "DOWN")
        yield
    finally:
        patient.lab.exec("beta", ["tc", "qdisc", "del", "dev", link, "clsact"], check=True)


@contextlib.contextmanager
def driver_mismatch(patient: Patient) -> Iterator[None]:
    message = "Failed to initialize NVML: Driver/library version mismatch"
    patient.before = path_before(
        patient, patient.stub("driver", "nvidia-smi", f"echo '{message}'; exit 18")
    )
    yield


@contextlib.contextmanager
def host_renamed(patient: Patient) -> Iterator[None]:
    patient.before = ["unshare", "--uts", "--", "sh", "-euc", 'hostname ubuntu; exec "$@"', "sh"]
    yield


@contextlib.contextmanager
def configuration_drift(patient: Patient) -> Iterator[None]:
    copy = patient.folder / "conf"
    shutil.copytree(patient.lab.slurm_conf.parent, copy)
    with (copy / "slurm.conf").open("a") as file:
        file.write("KillWait=31\n")
    patient.before = ["env", f"SLURM_CONF={copy / 'slurm.conf'}"]
    yield


Plant = Callable[[Patient], contextlib.AbstractContextManager[None]]
ERRORS: list[tuple[Plant, str, str]] = [
    (version_skew, "Slurm release", "21.08.5 on beta"),
    (no_cgroup_plugin, "cgroup plugin", "no plugin for it"),
    (memory_overstated, "hardware", "has 2000000 MiB of memory"),
    (gpu_missing, "GPU count", "has 2 GPUs, nvidia-smi shows 1"),
    (another_munge_key, "munge key", "another munge key than gamma"),
    (clock_off, "clock", "s ahead of the other nodes'"),
    (another_uid, "users", "user munge has different ids"),
    (firewall, "firewall", "from beta on port 6818 (slurmd)"),
    (driver_mismatch, "GPU driver", "Driver/library version mismatch"),
    (host_renamed, "host name", "host name is 'ubuntu'"),
    (configuration_drift, "configuration", "differs from the one slurmctld runs with"),
]


def test_doctor_finds_nothing_in_a_healthy_lab(patient: Patient) -> None:
    def errors() -> list[str]:
        logs = (path.read_text() for path in (patient.lab.folder / "log").glob("slurm*.log"))
        return [line for text in logs for line in text.splitlines() if "Zero Bytes" in line]

    before = errors()
    assert patient.findings() == []
    time.sleep(1)  # the daemons take a connection in a moment
    assert errors() == before


@pytest.mark.parametrize(
    ("plant", "check", "cause"), ERRORS, ids=[plant.__name__ for plant, _, _ in ERRORS]
)
def test_doctor_finds_a_planted_error_on_its_node(
    patient: Patient, plant: Plant, check: str, cause: str
) -> None:
    with plant(patient):
        findings = patient.findings()
    hits = [f for f in findings if f.check == check and cause in f.cause]
    assert hits, findings
    assert {f.nodes for f in hits} == {("beta",)}
    assert all(f.severity is Severity.ERROR and f.fix for f in hits)
    assert {node for f in findings for node in f.nodes} == {"beta"}, "a healthy node is reported"


def test_doctor_explains_a_drain_for_low_memory(patient: Patient) -> None:
    reason = "Low RealMemory (reported:24000 < 100.00% of configured:30000)"
    patient.lab.run(
        ["scontrol", "update", "nodename=beta", "state=drain", f"reason={reason}"], check=True
    )
    try:
        (finding,) = patient.findings()
    finally:
        patient.lab.run(["scontrol", "update", "nodename=beta", "state=resume"], check=True)
    assert (finding.check, finding.severity, finding.nodes) == (
        "node states",
        Severity.ERROR,
        ("beta",),
    )
    assert "ddp-slurm cluster probe" in finding.fix


def test_doctor_finds_a_node_that_is_off(patient: Patient) -> None:
    patient.lab.kill("alpha")
    try:
        found = patient.findings()
    finally:
        patient.lab.revive("alpha")
    not_responding = [f for f in found if f.check == "firewall" and f.nodes == ("alpha",)]
    assert {f.cause.split()[0] for f in not_responding} == {"gamma", "beta"}


def test_doctor_and_gpu_check_accept_power_saving(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    lab = make_lab(CLUSTER)
    with lab.slurm_conf.open("a") as file:
        file.write("SuspendProgram=/bin/true\nResumeProgram=/bin/true\n")
        file.write("SuspendTime=36000\nSuspendTimeout=1\n")
    lab.run(["scontrol", "reconfigure"], check=True)
    lab.run(["scontrol", "update", "nodename=beta", "state=power_down"], check=True)
    wait_until(
        lambda: "POWERED_DOWN" in lab.status()["beta"],
        lambda: f"beta to be switched off: {lab.status()}",
    )
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    patient = Patient(lab, tmp_path)
    no_card = patient.stub("no_card", "nvidia-smi", "exit 9")
    environ = {**os.environ, "PATH": f"{no_card}:{os.environ['PATH']}"}
    lab.exec("beta", [GPU_CHECK], env=environ, check=True)
    assert "DRAIN" not in lab.status()["beta"]
    assert patient.findings() == []


def test_run_by_srun_runs_on_the_node(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(patient.lab.slurm_conf))
    line = 'echo "$(uname -n) GPUs $CUDA_VISIBLE_DEVICES $(cat)"; exit 3'
    done = run_by_srun(patient.cluster.nodes[1], ["sh", "-c", line], input=b"a b")
    assert (done.status, done.out) == (3, "beta GPUs 0,1 a b\n")
    more = patient.cluster.nodes[1]._replace(gpus=(GpuModel(count=9),))
    with pytest.raises(
        RemoteError, match=r"beta: srun: error: Unable to allocate .* \(requested: gpu:9\)"
    ):
        run_by_srun(more, ["true"])


def test_every_card_computes_in_one_step(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards of a lab are stand-ins: each rank reports that it has none, and the network works."""
    monkeypatch.setenv("SLURM_CONF", str(patient.lab.slurm_conf))
    cluster = replace(patient.cluster, nodes=patient.cluster.nodes[:2])
    done = prove(cluster, sys.executable)
    assert done.status != 0
    lines = done.out.splitlines()
    assert lines[:3] == [f"rank {n}: no GPU: torch sees none" for n in RANKS]
    assert re.fullmatch(r"all-reduce over 3 ranks with gloo: [0-9.]+ GB/s on each link", lines[3])
    (finding,) = all_reduce(Snapshot(cluster, {}, proof=done))
    assert finding.severity is Severity.ERROR
    assert "rank 0 on gamma: no GPU" in finding.cause
    without = all_reduce(Snapshot(cluster, {}, proof=prove(cluster, "/no/python")))
    assert "/no/python" in next(without).cause
