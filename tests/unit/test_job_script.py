"""What the job script does, run with stubs for srun and Slurm's clients."""

import socket
from pathlib import Path

import pytest

from ddp_slurm.job_env import JobEnv

from .conftest import Stub
from .fake_slurm import FakeSlurm, MakeScript

RECORD = 'printf "%s\\0" "$@" > "$RECORD"; env -0 > "$RECORD.env"'


def test_srun_gets_every_segment_without_the_batch_shells_sizes(
    script: MakeScript, tmp_path: Path, stub: Stub
) -> None:
    stub("srun", RECORD)
    hostile = ["$(id)", "it's", 'say "x"', "a b", "*", "", "-x", "ü"]
    job = script(command=["python", *hostile], env=["V=a 'b' $HOME"])
    names = ("SLURM_NTASKS", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_MEM_PER_NODE")
    sizes = dict.fromkeys(names, "9")
    assert job.run(RECORD=str(tmp_path / "argv"), **sizes) == 0, job.log
    argv = (tmp_path / "argv").read_text().split("\0")[:-1]
    assert argv[:3] == ["--label", "--kill-on-bad-exit=1", "--wait=0"]
    segments = " ".join(argv[3:]).split(" : ")
    assert [segment.split(" python ")[0] for segment in segments] == [
        "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=8",
        "--nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task=8",
        "--nodes=1 --ntasks=4 --ntasks-per-node=4 --cpus-per-task=8",
    ]
    assert argv[-len(hostile) :] == hostile
    env = dict(
        item.partition("=")[::2] for item in (tmp_path / "argv.env").read_text().split("\0") if item
    )
    assert not set(sizes) & set(env)
    assert env["V"] == "a 'b' $HOME"
    assert env["DDP_SLURM_TASKS_PER_NODE"] == "1,2,4"
    assert "CUDA_VISIBLE_DEVICES" not in job.text


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_env_of_any_name_reaches_the_ranks(
    launcher: str, script: MakeScript, tmp_path: Path, stub: Stub
) -> None:
    stub("srun", RECORD)
    names = ["run_folder", "terminated", "marker", "status", "launch", "command", "attempt", "step"]
    options = {"launcher": launcher, "time": "10", "signal_seconds": 60, "max_restarts": 1}
    job = script(env=[f"{name}=mine" for name in names], **options)
    assert job.run(RECORD=str(tmp_path / "argv"), SLURMD_NODENAME="gamma") == 0, job.log
    assert (tmp_path / "argv").read_text().split("\0")[-5:-1] == ["python", "train.py", "5", "1"]
    env = (tmp_path / "argv.env").read_text().split("\0")
    assert {f"{name}=mine" for name in names} <= set(env)
    assert (job.exit_marker or "").startswith("status=0\nterminated=no\n")


@pytest.mark.parametrize("status", [0, 1, 3, 137])
def test_script_exits_with_the_status_of_srun(status: int, script: MakeScript, stub: Stub) -> None:
    stub("srun", f"exit {status}")
    assert script().run() == status


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SLURM_JOB_ID": ""}, "start it with: sbatch"),
        ({"SLURM_HET_SIZE": "1"}, "expected 3 components, got 1"),
    ],
)
def test_script_refuses_to_run_outside_its_job(
    env: dict[str, str], words: str, script: MakeScript, stub: Stub
) -> None:
    stub("srun", "echo started")
    job = script()
    assert job.run(**env) == 2
    assert words in job.log
    assert "started" not in job.log


@pytest.mark.parametrize(
    ("line", "status", "command"),
    [
        ("false", 1, "false"),
        ("module load nothing", 4, "module load nothing"),
        ("source hook.sh", 1, "[[ -e missing ]] (line 2 of hook.sh)"),
        ("loads() { [[ -e missing ]]; }; loads", 1, "[[ -e missing ]] (line "),
        ("true && exit 3", 3, "exit 3"),
        ('eval "$(echo false)"', 1, "false"),
    ],
)
def test_failed_setup_line_is_named_in_the_log(
    line: str, status: int, command: str, script: MakeScript, stub: Stub, tmp_path: Path
) -> None:
    stub("srun", "echo started")
    (tmp_path / "hook.sh").write_text("true\n[[ -e missing ]]\n")
    job = script(setup=[f"cd '{tmp_path}'", "module() { return 4; }", line])
    assert job.run() == status
    assert f"job script: --setup: exit status {status} of: " in job.log
    assert command in job.log or "return 4" in job.log
    assert "started" not in job.log
    assert (job.exit_marker or "").startswith(f"status={status}\n")


def test_failed_conda_hook_is_named_in_the_log(script: MakeScript, stub: Stub) -> None:
    conda = stub("conda", "echo 'conda() { :; }; [[ -n $NOT_SET ]]'")
    job = script(conda_env="torch")
    assert job.run(CONDA_EXE=str(conda)) == 1
    assert "job script: --conda-env: exit status 1 of: [[ -n $NOT_SET ]] (line " in job.log


def test_tasks_of_srun_are_reported_as_ranks(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    messages = [
        "srun: error: alpha: task 1: Exited with exit code 3",
        "srun: error: gamma: task 0: Killed",
        "srun: error: beta: tasks 0-1: Terminated",
    ]
    lines = "".join(f"echo '{line}' >&2\n" for line in messages)
    stub("srun", "echo '3: srun: error: alpha: task 0: not from srun'\n" + lines + "exit 3")
    groups = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": name for i, name in enumerate(("gamma", "beta"))}
    job = script()
    assert job.run(**groups, SLURM_JOB_NODELIST_HET_GROUP_2="alpha") == 3
    assert [line for line in job.log.splitlines() if line.startswith("job script")] == [
        "job script: rank 4 on alpha: Exited with exit code 3",
        "job script: rank 0 on gamma: Killed",
        "job script: ranks 1-2 on beta: Terminated",
    ]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_each_start_has_a_token_of_its_own(
    launcher: str, script: MakeScript, tmp_path: Path, stub: Stub
) -> None:
    stub("srun", RECORD)
    job = script(launcher=launcher, setup=["set -x"])
    tokens = set()
    for _ in range(2):
        assert job.run(RECORD=str(tmp_path / "argv"), SLURMD_NODENAME="gamma") == 0, job.log
        env = dict(
            item.partition("=")[::2] for item in (tmp_path / "argv.env").read_text().split("\0")
        )
        token = JobEnv.from_environ(env).token
        assert token
        for text in (job.text, job.log, (tmp_path / "argv").read_text()):
            assert token not in text
        tokens.add(token)
    assert len(tokens) == 2


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_port_that_is_taken_is_passed_over(
    launcher: str, family: socket.AddressFamily, script: MakeScript, tmp_path: Path, stub: Stub
) -> None:
    stub("srun", f'{RECORD}; echo "MASTER_PORT=$MASTER_PORT"')
    taken = free_port_of_a_job(family)
    with taken:
        port = taken.getsockname()[1]
        job = script(launcher=launcher)
        environ = {"SLURM_JOB_ID": str(19000 + port - 10000), "SLURMD_NODENAME": "gamma"}
        assert job.run(RECORD=str(tmp_path / "argv"), **environ) == 0, job.log
        argv = (tmp_path / "argv").read_text().split("\0")
        env = (tmp_path / "argv.env").read_text().split("\0")
    ports = [word.partition("=")[2] for word in argv if word.startswith("--master-port=")]
    ports += [line.partition("=")[2] for line in env if line.startswith("MASTER_PORT=")]
    assert ports
    assert all(port < int(found) < port + 100 for found in ports)


def free_port_of_a_job(family: socket.AddressFamily) -> socket.socket:
    """Something that listens at a port of those that jobs have."""
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    for port in range(28_000, 10_000, -7):
        try:
            return socket.create_server((host, port), family=family)
        except OSError:
            continue
    raise AssertionError("all ports are taken")


def test_port_of_the_user_wins(script: MakeScript, tmp_path: Path, stub: Stub) -> None:
    stub("srun", RECORD)
    job = script(env=["MASTER_PORT=12345"])
    assert job.run(RECORD=str(tmp_path / "argv")) == 0, job.log
    assert "MASTER_PORT=12345" in (tmp_path / "argv.env").read_text().split("\0")
