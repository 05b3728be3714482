"""The lab on live daemons: it starts, looks like several machines, and leaves nothing behind."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.lab import Lab, LabError, config, daemons, network, registry
from ddp_slurm.lab.layout import LABS_FOLDER
from ddp_slurm.lab.registry import check_nodes
from tests.slurm.conftest import wait_for_node
from tests.waiting import wait_until

TWO_NODES = """\
name: small
nodes:
  - {name: b, gpus: 1}
  - name: "a[1-2]"
    gpus: [{type: t4, count: 2}, {type: h100, count: 1, minors: [9]}]
    partition: big
"""
HET_JOB = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --gres=gpu:titan:1 --mem=1G
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=2 --gres=gpu:v100:2 --mem=1G
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=4 --gres=gpu:a100:4 --mem=1G
unset SLURM_NTASKS SLURM_NPROCS SLURM_TASKS_PER_NODE SLURM_NNODES SLURM_NODELIST
unset SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_CPUS_PER_NODE SLURM_MEM_PER_NODE
sum='$(python3 -c "print(6 * 7)")'
task='echo "$SLURM_PROCID $(hostname) $CUDA_VISIBLE_DEVICES $HOME '$sum'"'
srun -N1 -n1 bash -c "$task" : -N1 -n2 bash -c "$task" : -N1 -n4 bash -c "$task"
"""


def residue(name: str) -> list[str]:
    """Everything of a lab on the machine: files, namespaces, mounts and processes."""
    found = [str(path) for path in LABS_FOLDER.glob(f"{name}/**/*")]
    found += network.namespaces(f"ddplab.{name}.")
    found += [
        line
        for line in Path("/proc/self/mounts").read_text().splitlines()
        if f"/{name}/" in line or f".{name}." in line
    ]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if f"{LABS_FOLDER}/{name}/" in words:
            found.append(words)
    return found


def output_on(lab: Lab, node: str, *argv: str) -> str:
    done = lab.exec(node, argv, capture_output=True, text=True, check=True)
    return done.stdout


def machine_link(number: int) -> int | None:
    """The kernel's index of that network's link; another lab's link of the name has another one."""
    file = Path("/sys/class/net", network.link_name(number), "ifindex")
    return int(file.read_text()) if file.exists() else None


def cli(*args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddp_slurm.cli", "lab", *args],
        capture_output=True,
        text=True,
        **kwargs,
    )


def test_het_job_runs_on_separate_hosts_and_devices(live_lab, run_job):
    assert live_lab.status() == {"gamma": "IDLE", "beta": "IDLE", "alpha": "IDLE"}
    job = run_job(live_lab, HET_JOB)
    home = os.environ["HOME"]
    assert job.state == "COMPLETED", job.output
    assert sorted(job.output.splitlines()) == [
        f"0 gamma 0 {home} 42",
        f"1 beta 0,1 {home} 42",
        f"2 beta 0,1 {home} 42",
        *(f"{rank} alpha 0,1,2,3 {home} 42" for rank in (3, 4, 5, 6)),
    ]


def test_node_resolves_the_others_and_runs_clients(live_lab):
    code = f"""
import socket
print(socket.gethostname(), socket.gethostbyname("alpha"))
print(socket.gethostbyaddr({live_lab.node("gamma").address!r})[0])
"""
    found = output_on(live_lab, "beta", sys.executable, "-c", code)
    assert found.split() == ["beta", live_lab.node("alpha").address, "gamma"]
    task = "echo $(hostname) $CUDA_VISIBLE_DEVICES"
    step = ["srun", "-N1", "-n2", "--gres=gpu:a100:3", "bash", "-c", task]
    assert output_on(live_lab, "beta", *step).splitlines() == ["alpha 0,1,2"] * 2
    assert live_lab.exec("gamma", ["sh", "-c", "exit 7"]).returncode == 7


REQUEUES_ITSELF = """\
#!/bin/bash
echo run ${SLURM_RESTART_COUNT:-0}
[ -n "$SLURM_RESTART_COUNT" ] || scontrol requeue $SLURM_JOB_ID
"""


def test_batch_script_can_requeue_its_job(live_lab, run_job):
    job = run_job(live_lab, REQUEUES_ITSELF, "--requeue", "--open-mode=append", "--mem=1G")
    # Slurm reports the requeue in the log, too.
    runs = [line for line in job.output.splitlines() if line.startswith("run")]
    assert (job.state, runs) == ("COMPLETED", ["run 0", "run 1"])


def test_unknown_names_are_refused(live_lab, needs_lab):
    with pytest.raises(LabError, match=r"no node 'alfa'; did you mean 'alpha'"):
        live_lab.kill("alfa")
    with pytest.raises(LabError, match="no lab 'nope'"):
        Lab.find("nope")
    with pytest.raises(LabError, match="not a lab's name"):
        Lab.find("../x")


def test_second_lab_runs_beside_and_leaves_nothing(live_lab, make_lab):
    lab = make_lab(TWO_NODES)
    assert lab.status() == {"b": "IDLE", "a1": "IDLE", "a2": "IDLE"}
    assert Lab.find(lab.name) == lab
    assert lab.network != live_lab.network
    with pytest.raises(LabError, match=f"'{lab.name}' already exists"):
        Lab.up(Cluster("other", (Node("x"),)), lab.name)
    gres = "--gres=gpu:t4:2,gpu:h100:1"
    devices = lab.ask(["srun", "-wa2", "-pbig", gres, "printenv", "CUDA_VISIBLE_DEVICES"])
    assert devices.out.strip() == "0,1,2", devices.text
    link = machine_link(lab.network)
    assert residue(lab.name)
    assert link
    lab.down()
    assert residue(lab.name) == []
    assert machine_link(lab.network) != link
    assert set(live_lab.status().values()) == {"IDLE"}
    with pytest.raises(LabError, match="no lab"):
        lab.down()


def test_killed_node_loses_its_processes_and_goes_down(make_lab):
    lab = make_lab(TWO_NODES)

    def cable() -> str:
        return output_on(lab, "b", "cat", "/sys/class/net/eth0/operstate").strip()

    runaway = ["sh", "-c", "setsid sleep 1000 & echo $!"]
    lab.exec("b", runaway, check=True, stdout=subprocess.DEVNULL)
    assert cable() == "up"
    lab.kill("b")
    assert network.processes(lab.node("b").netns) == []
    assert cable() != "up"
    wait_for_node(lab, "b", "DOWN")
    assert lab.status()["a1"] == "IDLE"
    lab.revive("b")
    assert wait_for_node(lab, "b", "IDLE") == "IDLE"
    assert cable() == "up"


STAGES = [
    "write_whole",
    "make_switch",
    "make_node",
    "write_configuration",
    "start_munged",
    "start_slurmctld",
    "start_slurmd",
]


@pytest.mark.parametrize("stage", STAGES)
def test_down_removes_what_a_killed_up_left(needs_lab, new_name, stage, tmp_path):
    (tmp_path / "cluster.yaml").write_text(TWO_NODES)
    code = f"""
import os, signal
from ddp_slurm.cluster import Cluster
from ddp_slurm.lab import Lab, config, daemons, network, registry
owner = next(o for o in (registry, config, network, daemons) if {stage!r} in vars(o))
original = getattr(owner, {stage!r})
def killed_here(*args, **kwargs):
    original(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, {stage!r}, killed_here)
Lab.up(Cluster.load("cluster.yaml"), {new_name!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert residue(new_name)
    number = registry.find(new_name).network
    link = machine_link(number)
    assert bool(link) == (stage != "write_whole")
    assert cli("down", "--name", new_name).returncode == 0
    assert residue(new_name) == []
    assert link is None or machine_link(number) != link


def test_down_needs_no_record_and_no_whole_namespaces(make_lab, monkeypatch):
    lab = make_lab(TWO_NODES)
    network.kill_processes(lab.switch)  # slurmctld and munged
    monkeypatch.setattr(daemons, "ANSWER_SECONDS", 1)
    with pytest.raises(LabError, match="slurmctld does not respond"):
        lab.status()
    (lab.folder / "lab.json").unlink()
    half_made = network.NETNS_FOLDER / f"ddplab.{lab.name}.half"
    half_made.touch()
    lab.down()
    assert residue(lab.name) == []
    assert not half_made.exists()


RUNAWAYS = """\
#!/bin/bash
setsid nohup sleep 1000 &
setsid sleep 1000 &
echo $$ > started
sleep 1000
"""


def test_job_and_its_runaway_children_end_with_the_lab(make_lab, tmp_path, clean_environ):
    lab = make_lab(TWO_NODES)
    (tmp_path / "job.sh").write_text(RUNAWAYS)
    settings = {"env": clean_environ, "cwd": tmp_path, "check": True, "capture_output": True}
    lab.run(["sbatch", "-wb", "job.sh"], **settings)
    wait_until((tmp_path / "started").exists, "the job's script")
    handles = [os.pidfd_open(pid) for pid in network.processes(lab.node("b").netns)]
    assert len(handles) >= 5  # slurmd, slurmstepd, the script, two runaways
    lab.down()
    ended, _, _ = select.select(handles, [], [], 0)  # a zombie counts as ended
    for handle in handles:
        os.close(handle)
    assert ended == handles


@pytest.mark.parametrize(
    ("file", "line", "daemon"),
    [
        ("slurm.conf", "NoSuchKey=1", "slurmctld"),
        ("gres.conf", "NodeName=a1 Name=gpu NoSuchKey=1", "slurmd"),
    ],
)
def test_daemon_that_does_not_start_is_quoted(needs_lab, new_name, monkeypatch, file, line, daemon):
    write_configuration = config.write_configuration

    def broken(lab, cluster, version):
        write_configuration(lab, cluster, version)
        with (lab.slurm_conf.parent / file).open("a") as conf:
            conf.write(line + "\n")

    monkeypatch.setattr(config, "write_configuration", broken)
    with pytest.raises(LabError) as error:
        Lab.up(Cluster("x", (Node("b"), Node("a1"))), new_name)
    assert daemon in str(error.value)
    assert "NoSuchKey" in str(error.value)
    assert residue(new_name) == []


def test_command_line(needs_lab, new_name, tmp_path):
    (tmp_path / "cluster.yaml").write_text(TWO_NODES)
    name = ("--name", new_name)
    up = cli("up", *name, cwd=tmp_path)
    try:
        lab = Lab.find(new_name)
        # for eval "$(ddp-slurm lab up ...)"
        assert up.stdout == f"export SLURM_CONF={lab.slurm_conf}\n"
        assert f"ddp-slurm lab down --name {new_name}" in up.stderr
        assert cli("status", *name).stdout == "b\tIDLE\na1\tIDLE\na2\tIDLE\n"
        script = "hostname; sinfo -ho %P; exit 5"
        inside = cli("exec", *name, "a1", "sh", "-c", script, "--help")
        assert inside.returncode == 5
        assert sorted(inside.stdout.split()) == ["a1", "all*", "big"]
        down_from_inside = [sys.executable, "-m", "ddp_slurm.cli", "lab", "down", *name]
        refused = cli("exec", *name, "a2", *down_from_inside)
        assert refused.returncode == 2
        assert "from outside the lab" in refused.stderr
        assert lab.status()["a2"] == "IDLE"
        assert cli("kill", *name, "a1").returncode == 0
        assert network.processes(lab.node("a1").netns) == []
        assert cli("revive", *name, "a1").returncode == 0
        assert wait_for_node(lab, "a1", "IDLE") == "IDLE"
    finally:
        down = cli("down", *name)
    assert (down.returncode, residue(new_name)) == (0, [])
    again = cli("down", *name)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith(f"error: no lab '{new_name}' is running")


def test_other_users_reach_a_lab_made_with_a_narrow_umask(make_lab):
    former = os.umask(0o077)
    try:
        lab = make_lab("nodes:\n  - {name: a, gpus: 1}\n")
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(former)
    answer = lab.ask(["runuser", "-u", "nobody", "--", "sinfo", "-ho", "%N"], timeout_seconds=30)
    assert answer.out == "a\n", answer.text


def test_check_nodes_refuses_what_a_lab_cannot_have():
    longest = Cluster("x", (Node("a" * 30),))
    check_nodes(longest, "lab")
    with pytest.raises(LabError, match="has 30 characters; in a lab called 'labs' at most 29 fit"):
        check_nodes(longest, "labs")
    with pytest.raises(LabError, match="'localhost'"):
        check_nodes(Cluster("x", (Node("localhost"),)), "lab")


def test_up_names_missing_programs(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root"):
        Lab.up(Cluster("x", (Node("a"),)))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(
        "shutil.which", lambda program, path: None if program in ("munged", "slurmd") else program
    )
    with pytest.raises(
        LabError,
        match=r"slurmd, munged.*apt-get install -y --no-install-recommends munge slurm-wlm$",
    ):
        Lab.up(Cluster("x", (Node("a"),)))
