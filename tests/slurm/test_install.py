"""`ddp-slurm cluster install` on three bare Debian machines: from nothing to the first het job."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until

from .bare_machines import Machines, machines

GPUS = {"gamma": 1, "alpha": 2, "beta": 1}
RANKS = ["rank 0 on gamma", "rank 1 on alpha", "rank 2 on alpha", "rank 3 on beta"]
pytestmark = pytest.mark.timeout(1200)

# Everything that an installation decides; not the key, logs, caches and times, which differ.
STATE = r"""
cd /
find etc/slurm etc/munge etc/chrony/chrony.conf etc/default/slurmd etc/hosts etc/hostname \
    var/lib/slurm -maxdepth 1 \
    ! -name '*_state*' ! -name 'last_*' ! -name 'clustername' ! -name '*.xml' ! -name 'slurmctld' \
    -printf '%p %M %u:%g\n' | sort
getent passwd munge slurm
cat etc/hosts etc/chrony/chrony.conf etc/default/slurmd
cd run/slurm/conf
cat slurm.conf gres.conf cgroup.conf
for daemon in chronyd munged slurmctld slurmd; do
    pidof -s $daemon >/dev/null && echo "$daemon runs"
done
true
"""


class Cluster:
    """The machines, and the command line that installs on them."""

    def __init__(self, folder: Path, running: Machines) -> None:
        self.running, self.file = running, folder / "cluster.yaml"
        types = {"gamma": "titan", "alpha": "a100", "beta": "v100"}
        nodes = "".join(
            f"  - {{name: {name}, address: {running.address(name)}, cpus: 2, memory: 1500M, "
            f"gpus: {{type: {types[name]}, count: {gpus}}}}}\n"
            for name, gpus in running.gpus.items()
        )
        ssh = f"ssh: {{user: root, identity: '{running.identity}'}}"
        self.file.write_text(f"name: lab\ncontroller: alpha\n{ssh}\nnodes:\n{nodes}")
        self.environ = {**os.environ, "PATH": f"{running.ssh_folder}:{os.environ['PATH']}"}
        self.command = [
            sys.executable,
            "-m",
            "ddp_slurm.cli",
            "cluster",
            "install",
            "--cluster",
            str(self.file),
        ]

    def call(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "ddp_slurm.cli", *words]
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=600, check=False
        )

    def install(self, *options: str) -> "subprocess.CompletedProcess[str]":
        return self.call("cluster", "install", "--cluster", str(self.file), *options)

    def state(self) -> dict[str, str]:
        return {
            name: self.running.exec(name, "sh", "-c", STATE).stdout for name in self.running.gpus
        }

    def daemons(self) -> dict[str, str]:
        pids = [
            "sh",
            "-c",
            "for d in chronyd munged slurmctld slurmd; do pidof -s $d || true; done",
        ]
        return {name: self.running.exec(name, *pids).stdout for name in self.running.gpus}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three machines on which one command has been run."""
    folder = tmp_path_factory.mktemp("install")
    with machines(folder, 120 + os.getpid() % 60, GPUS) as running:
        yield Cluster(folder, running)


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> "subprocess.CompletedProcess[str]":
    dry = cluster.install("--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "changed" not in dry.stdout
    assert cluster.running.exec("alpha", "sh", "-c", "command -v munged; id slurm").stdout == ""
    return cluster.install()


def test_install_from_nothing_to_the_first_het_job(
    cluster: Cluster, installed: "subprocess.CompletedProcess[str]"
) -> None:
    assert installed.returncode == 0, installed.stdout + installed.stderr
    lines = [line.strip() for line in installed.stdout.splitlines()]
    assert [line for line in lines if line.startswith("rank ")] == RANKS
    keys = [
        cluster.running.exec(
            n, "sh", "-c", "cd /etc/munge; stat -c '%a %U %s' munge.key; cksum <munge.key"
        )
        for n in GPUS
    ]
    assert len({key.stdout for key in keys}) == 1
    assert keys[0].stdout.startswith("400 munge 1024\n")
    states = cluster.running.exec("gamma", "sinfo", "-h", "-N", "-o", "%N %T %G").stdout.split("\n")
    assert sorted(filter(None, states)) == [
        "alpha idle gpu:a100:2",
        "beta idle gpu:v100:1",
        "gamma idle gpu:titan:1",
    ]


def test_install_twice_changes_nothing(
    cluster: Cluster, installed: "subprocess.CompletedProcess[str]"
) -> None:
    before, daemons = cluster.state(), cluster.daemons()
    again = cluster.install()
    assert (again.returncode, "nothing to change" in again.stderr) == (0, True), (
        again.stdout + again.stderr
    )
    assert cluster.state() == before
    assert cluster.daemons() == daemons


def test_install_fixes_only_what_has_changed(
    cluster: Cluster, installed: "subprocess.CompletedProcess[str]"
) -> None:
    before = cluster.state()
    cluster.running.exec("beta", "sh", "-c", "chmod 0440 /etc/munge/munge.key")
    cluster.running.exec(
        "alpha", "scontrol", "update", "nodename=gamma", "state=down", "reason=planted"
    )
    fixed = cluster.install()
    changed = [line.split()[:2] for line in fixed.stdout.splitlines() if line.endswith(" changed")]
    assert changed == [["munge", "beta"]], fixed.stdout + fixed.stderr
    assert "gamma" in fixed.stdout
    cluster.running.exec("alpha", "scontrol", "update", "nodename=gamma", "state=resume")
    assert cluster.state() == before


def test_doctor_and_probe_work_over_ssh(
    cluster: Cluster, installed: "subprocess.CompletedProcess[str]", tmp_path: Path
) -> None:
    states = ["sinfo", "-h", "-o", "%T"]  # of gamma, which was DOWN before
    wait_until(lambda: cluster.running.exec("gamma", *states).stdout.split() == ["idle"])
    report = json.loads(cluster.call("doctor", "--cluster", str(cluster.file), "--json").stdout)
    # These machines really have no Python.
    assert [(f["check"], f["severity"]) for f in report["findings"] if f["severity"] != "ok"] == [
        ("torch", "warning"),
        ("versions", "skipped"),
        ("all-reduce", "skipped"),
    ]
    cluster.running.exec("beta", "sh", "-c", "rm /dev/nvidia0")
    missing = json.loads(cluster.call("doctor", "--cluster", str(cluster.file), "--json").stdout)
    cluster.running.exec("beta", "mknod", "-m", "666", "/dev/nvidia0", "c", "195", "0")
    assert {tuple(f["nodes"]) for f in missing["findings"] if f["check"] == "GPU count"} == {
        ("beta",)
    }
    copy = tmp_path / "cluster.yaml"
    copy.write_text(cluster.file.read_text())
    shown = cluster.call("cluster", "probe", "--cluster", str(copy)).stdout
    assert shown.count("+    os: debian-12") == 3
    assert shown.count("+    interface: eth0") == 3
    assert copy.read_text() == cluster.file.read_text()


def test_install_after_an_interruption_ends_the_same(
    cluster: Cluster, installed: "subprocess.CompletedProcess[str]", tmp_path: Path
) -> None:
    with machines(tmp_path, 190 + os.getpid() % 60, GPUS) as running:
        other = Cluster(tmp_path, running)
        first = subprocess.Popen(
            other.command,
            env=other.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert first.stdout is not None
        seen = ""
        for line in first.stdout:
            seen += line
            if seen.count("clock ") == 3:  # the packages are being installed now
                break
        os.killpg(first.pid, signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        assert "packages" not in seen
        second = other.install()
        assert second.returncode == 0, second.stdout + second.stderr
        assert [line.strip() for line in second.stdout.splitlines() if "rank " in line] == RANKS
        mine = {
            n: text.replace(f"198.18.{running.network}.", "NET.")
            for n, text in other.state().items()
        }
        theirs = {
            n: t.replace(f"198.18.{cluster.running.network}.", "NET.")
            for n, t in cluster.state().items()
        }
        assert mine == theirs
