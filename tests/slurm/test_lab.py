"""The lab on live daemons: it starts, looks like several machines, lets nodes die, and leaves nothing behind."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.lab import Lab, LabError, config, network
from ddp_slurm.lab.lab import LABS_FOLDER, check_nodes

TWO_NODES = """\
name: small
nodes:
  - {name: b, gpus: 1}
  - {name: "a[1-2]", gpus: [{type: t4, count: 2}, {type: h100, count: 1, minors: [9]}], partition: big}
"""
HET_JOB = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --gres=gpu:titan:1 --mem=1G
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=2 --gres=gpu:v100:2 --mem=1G
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=4 --gres=gpu:a100:4 --mem=1G
unset SLURM_NTASKS SLURM_NPROCS SLURM_TASKS_PER_NODE SLURM_NNODES SLURM_NODELIST SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES
unset SLURM_JOB_CPUS_PER_NODE SLURM_MEM_PER_NODE
task='echo "$SLURM_PROCID $(hostname) $CUDA_VISIBLE_DEVICES $HOME $(python3 -c "print(6 * 7)")"'
srun -N1 -n1 bash -c "$task" : -N1 -n2 bash -c "$task" : -N1 -n4 bash -c "$task"
"""


def residue(name: str) -> list[str]:
    """Everything of a lab that can be seen on the machine: files, namespaces, mounts, links and processes."""
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


def machine_links() -> set[str]:
    return {name for name in os.listdir("/sys/class/net") if name.startswith("ddplab")}


def cli(*args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddp_slurm.cli", "lab", *args],
        capture_output=True,
        text=True,
        **kwargs,
    )


def test_a_het_job_runs_on_hosts_of_its_own_with_devices_of_its_own(live_lab, run_job):
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


def test_nodes_resolve_each_other_without_dns_and_clients_work_inside_them(live_lab):
    python = "import socket; print(socket.gethostname(), socket.gethostbyname('alpha'), socket.gethostbyaddr({!r})[0])"
    done = live_lab.exec(
        "beta",
        [sys.executable, "-c", python.format(live_lab.node("gamma").address)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["beta", live_lab.node("alpha").address, "gamma"]
    inner = live_lab.exec(
        "beta",
        [
            "srun",
            "-N1",
            "-n2",
            "--gres=gpu:a100:3",
            "bash",
            "-c",
            "echo $(hostname) $CUDA_VISIBLE_DEVICES",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert inner.stdout.splitlines() == ["alpha 0,1,2"] * 2
    assert live_lab.exec("gamma", ["sh", "-c", "exit 7"]).returncode == 7


def test_batch_script_can_requeue_its_job(live_lab, run_job):
    script = '#!/bin/bash\necho run ${SLURM_RESTART_COUNT:-0}\n[ -n "$SLURM_RESTART_COUNT" ] || scontrol requeue $SLURM_JOB_ID\n'
    job = run_job(live_lab, script, "--requeue", "--open-mode=append", "--mem=1G")
    runs = [
        line for line in job.output.splitlines() if line.startswith("run")
    ]  # and Slurm's word on the requeue
    assert (job.state, runs) == ("COMPLETED", ["run 0", "run 1"])


def test_unknown_names_are_refused(live_lab, needs_lab):
    with pytest.raises(LabError, match=r"no node 'alfa'; did you mean 'alpha'"):
        live_lab.kill("alfa")
    with pytest.raises(LabError, match="no lab 'nope'"):
        Lab.find("nope")
    with pytest.raises(LabError, match="not a lab's name"):
        Lab.find("../x")


def test_two_labs_side_by_side_and_nothing_of_them_afterwards(live_lab, make_lab):
    lab = make_lab(TWO_NODES)
    assert lab.status() == {"b": "IDLE", "a1": "IDLE", "a2": "IDLE"}
    assert Lab.find(lab.name) == lab
    assert lab.network != live_lab.network
    with pytest.raises(LabError, match=f"'{lab.name}' is there already"):
        Lab.up(Cluster("other", (Node("x"),)), lab.name)
    devices = lab.run(
        ["srun", "-wa2", "-pbig", "--gres=gpu:t4:2,gpu:h100:1", "printenv", "CUDA_VISIBLE_DEVICES"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert devices.stdout.strip() == "0,1,2"
    links = machine_links()
    assert residue(lab.name)
    lab.down()
    assert residue(lab.name) == []
    assert links - machine_links() == {network.link_name(lab.network)}
    assert set(live_lab.status().values()) == {"IDLE"}
    with pytest.raises(LabError, match="no lab"):
        lab.down()


def states_of(lab: Lab, node: str, wanted: str) -> str:
    """Wait until Slurm's state of a node begins with ``wanted``."""
    give_up = time.monotonic() + 120
    while not (state := lab.status()[node]).startswith(wanted) and time.monotonic() < give_up:
        time.sleep(0.1)
    return state


def test_a_killed_node_takes_its_ranks_along_and_goes_down(make_lab, tmp_path):
    lab = make_lab(TWO_NODES)

    def cable() -> str:
        return lab.exec(
            "b", ["cat", "/sys/class/net/eth0/operstate"], stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    lab.exec(
        "b", ["sh", "-c", "setsid sleep 1000 & echo $!"], check=True, stdout=subprocess.DEVNULL
    )
    assert cable() == "up"
    lab.kill("b")
    assert network.processes(lab.node("b").netns) == []
    assert cable() != "up"
    assert states_of(lab, "b", "DOWN").startswith("DOWN")
    assert lab.status()["a1"] == "IDLE"
    lab.revive("b")
    assert states_of(lab, "b", "IDLE") == "IDLE"
    assert cable() == "up"


STAGES = [
    "_record",
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
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.lab import Lab, daemons, lab, network
owner = next(o for o in (Lab, lab, network, daemons) if {stage!r} in vars(o))
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
    links = machine_links()
    assert cli("down", "--name", new_name).returncode == 0
    assert residue(new_name) == []
    assert machine_links() <= links


def test_down_manages_without_its_record_and_with_half_made_namespaces(make_lab):
    lab = make_lab(TWO_NODES)
    for pid in network.processes(f"ddplab.{lab.name}.{lab.controller}"):  # slurmctld and munged
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(LabError, match="slurmctld does not answer"):
        lab.status()
    (lab.folder / "lab.json").unlink()
    half_made = network.NETNS_FOLDER / f"ddplab.{lab.name}.half"
    half_made.touch()
    lab.down()
    assert residue(lab.name) == []
    assert not half_made.exists()


def test_a_job_and_its_runaway_children_end_with_the_lab(make_lab, tmp_path, clean_environ):
    lab = make_lab(TWO_NODES)
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\nsetsid nohup sleep 1000 &\nsetsid sleep 1000 &\necho $$ > started\nsleep 1000\n"
    )
    lab.run(
        ["sbatch", "-wb", "job.sh"],
        env=clean_environ,
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    give_up = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < give_up:
        time.sleep(0.05)
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
def test_a_daemon_that_does_not_start_is_quoted_and_nothing_stays(
    needs_lab, new_name, monkeypatch, file, line, daemon
):
    def broken(lab, cluster, version):
        config.write_configuration(lab, cluster, version)
        with (lab.slurm_conf.parent / file).open("a") as conf:
            conf.write(line + "\n")

    monkeypatch.setattr("ddp_slurm.lab.lab.write_configuration", broken)
    with pytest.raises(LabError) as error:
        Lab.up(Cluster("x", (Node("b"), Node("a1"))), new_name)
    assert daemon in str(error.value)
    assert "NoSuchKey" in str(error.value)
    assert residue(new_name) == []


def test_command_line(needs_lab, new_name, tmp_path):
    (tmp_path / "cluster.yaml").write_text(TWO_NODES)
    up = cli("up", "--name", new_name, cwd=tmp_path)
    try:
        lab = Lab.find(new_name)
        assert (
            up.stdout == f"export SLURM_CONF={lab.slurm_conf}\n"
        )  # for eval "$(ddp-slurm lab up ...)"
        assert f"ddp-slurm lab down --name {new_name}" in up.stderr
        assert cli("status", "--name", new_name).stdout == "b\tIDLE\na1\tIDLE\na2\tIDLE\n"
        inside = cli(
            "exec", "--name", new_name, "a1", "sh", "-c", "hostname; sinfo -ho %P; exit 5", "--help"
        )
        assert (inside.returncode, sorted(inside.stdout.split())) == (5, ["a1", "all*", "big"])
        suicide = cli(
            "exec",
            "--name",
            new_name,
            "a2",
            sys.executable,
            "-m",
            "ddp_slurm.cli",
            "lab",
            "down",
            "--name",
            new_name,
        )
        assert (suicide.returncode, "from outside the lab" in suicide.stderr) == (2, True)
        assert lab.status()["a2"] == "IDLE"
        assert cli("kill", "--name", new_name, "a1").returncode == 0
        assert network.processes(lab.node("a1").netns) == []
        assert cli("revive", "--name", new_name, "a1").returncode == 0
        assert states_of(lab, "a1", "IDLE") == "IDLE"
    finally:
        down = cli("down", "--name", new_name)
    assert (down.returncode, residue(new_name)) == (0, [])
    again = cli("down", "--name", new_name)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith(f"error: no lab '{new_name}' is running")


def test_other_users_reach_a_lab_of_a_root_with_a_narrow_umask(make_lab):
    former = os.umask(0o077)
    try:
        lab = make_lab("nodes:\n  - {name: a, gpus: 1}\n")
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(former)
    asked = lab.run(
        ["runuser", "-u", "nobody", "--", "sinfo", "-ho", "%N"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert asked.stdout == "a\n", asked.stderr


def test_nodes_that_a_lab_cannot_have_are_refused():
    longest = Cluster("x", (Node("a" * 30),))
    check_nodes(longest, "lab")
    with pytest.raises(LabError, match="has 30 characters; in a lab called 'labs' at most 29 fit"):
        check_nodes(longest, "labs")
    with pytest.raises(LabError, match="'localhost'"):
        check_nodes(Cluster("x", (Node("localhost"),)), "lab")


def test_what_is_missing_is_named(monkeypatch):
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
