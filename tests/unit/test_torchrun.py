"""torchrun's lines and containers: every word arrives unchanged, and nothing in it is executed."""

import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_slurm.backends import torchrun as backend
from ddp_slurm.cluster import Cluster, GpuModel, Node, Ssh
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job.checks import check_together
from ddp_slurm.job.options import JobOptions, OptionsError
from ddp_slurm.plan import Plan, make_plan
from ddp_slurm.render import RenderError, render_sbatch
from ddp_slurm.render.torchrun import TorchrunError, network_commands, render_torchrun

HOSTILE = [
    "a b",
    "it's",
    'say "x"',
    "$HOME",
    "*",
    "a;b&c|d",
    "back\\slash",
    "ü 世界",
    "--flag",
    "# no comment",
    "!x",
    "~",
    "=x",
    "",
    "{a,b}",
    "<(x)",
    "%h",
]
WORDS = [*HOSTILE, "$(touch made)", "`touch made`"]
VALUES = {f"VALUE{index}": word for index, word in enumerate(HOSTILE)}
ENV = [f"{name}={value}" for name, value in VALUES.items()]
CLUSTER = Cluster(
    "boxes",
    (
        Node("gamma", (GpuModel(count=1),), address="192.0.2.1", interface="eno1"),
        Node(
            "beta",
            (GpuModel(count=2),),
            address="192.0.2.2",
            ssh=Ssh(user="me", port=2222),
            env=(("NODE", "be ta"),),
        ),
    ),
)

RECORDER = """#!{python}
import json, os, sys
program = os.path.basename(sys.argv[0])
with open({log!r}, "a") as log:
    log.write(json.dumps([program, sys.argv[1:], dict(os.environ), os.getcwd()]) + "\\n")
"""


def plan_of(**options: object) -> Plan:
    return make_plan(CLUSTER, JobOptions.read({"command": ["python", "t.py"], **options}))


class Stubs:
    """Programs that only record how they were called."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.log = folder / "stubs", folder / "calls"
        self.bin.mkdir()
        self.environ = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"}

    def add(self, name: str) -> str:
        file = self.bin / name
        file.write_text(RECORDER.format(python=sys.executable, log=str(self.log)))
        file.chmod(0o755)
        return str(file)

    def calls(self) -> list[tuple[str, list[str], dict[str, str], str]]:
        return (
            [json.loads(line) for line in self.log.read_text().splitlines()]
            if self.log.exists()
            else []
        )


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


def bash(line: str, stubs: Stubs, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", line], env=stubs.environ, cwd=folder, capture_output=True, text=True
    )


def test_line_runs_torchrun_with_the_planned_words(stubs: Stubs, tmp_path: Path) -> None:
    python = stubs.add("my python")
    stubs.environ |= {"OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": ""}
    first, second = render_torchrun(
        plan_of(env=["A=x"], **{"global-batch-size": "30"}), str(tmp_path), python
    )
    done = bash(first.line, stubs, Path("/"))
    bash(second.line, stubs, Path("/"))
    assert done.returncode == 0, done.stderr
    (_, argv, environ, folder), (_, argv2, environ2, _) = stubs.calls()
    assert argv[:5] == [
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--node-rank=0",
    ]
    assert argv2[2:5] == ["--nnodes=2", "--nproc-per-node=2", "--node-rank=1"]
    assert argv[5] == "--master-addr=192.0.2.1"
    port = int(argv[6].removeprefix("--master-port="))
    assert 10_000 <= port < 29_000
    assert re.fullmatch("--rdzv-id=[0-9a-f]{8}", argv[7])
    assert argv[8:] == [
        "--rdzv-conf=timeout=180",
        "--max-restarts=0",
        "--no-python",
        python,
        "t.py",
    ]
    assert argv2[5:] == argv[5:]
    assert folder == str(tmp_path)
    assert (environ["PYTHONUNBUFFERED"], environ["OMP_NUM_THREADS"]) == ("1", "1")
    assert (environ["A"], environ["DDP_SLURM_SHARES"], environ["DDP_SLURM_TASKS_PER_NODE"]) == (
        "x",
        "10(x3)",
        "1,2",
    )
    assert (environ["NCCL_SOCKET_IFNAME"], environ["GLOO_SOCKET_IFNAME"]) == ("=eno1", "eno1")
    assert environ2["NODE"] == "be ta"
    assert "GLOO_SOCKET_IFNAME" not in environ2


def test_rendezvous_differs_by_plan_and_attempt() -> None:
    def option(word: str, attempt: int = 0, folder: str = "/", **options: object) -> str:
        line = render_torchrun(plan_of(**options), folder, "p", attempt)[-1].line
        return re.findall(f" --{word}=([^ ]*) ", line)[0]

    ports = [int(option("master-port", attempt)) - 10_000 for attempt in (0, 1, 2, 19_000)]
    assert ports == [(ports[0] + attempt) % 19_000 for attempt in (0, 1, 2, 19_000)]
    plans = ({}, {"folder": "/a"}, {"name": "b"}, {"nodes": "beta"})
    assert len({option("rdzv-id", **values) for values in plans}) == len(plans)
    own = {"env": ["MASTER_ADDR=fd00::1", "MASTER_PORT=7"]}
    assert [option("master-addr", **own), option("master-port", attempt=1, **own)] == [
        "fd00::1",
        "7",
    ]


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("python t.py", {}, ["/a b/p", "t.py"]),
        ("python3 t.py", {}, ["/a b/p", "t.py"]),
        ("t.py x", {}, ["/a b/p", "t.py", "x"]),
        ("python3.9 t.py", {}, ["python3.9", "t.py"]),
        ("./train", {}, ["./train"]),
        ("t.py", {"python": "/c d/q"}, ["/c d/q", "t.py"]),
        ("python3 t.py", {"venv": "/v"}, ["python3", "t.py"]),
    ],
)
def test_bare_python_is_the_interpreter_of_the_node(
    command: str, options: dict[str, str], words: list[str]
) -> None:
    line = render_torchrun(plan_of(**{"command": command, **options}), "/", "/a b/p")[0].line
    assert shlex.split(line.partition(" --no-python ")[2].removesuffix(" )")) == words


def test_values_that_start_with_an_equals_sign_are_quoted() -> None:
    """zsh expands A==eth0 to the path of a program eth0."""
    assert " NCCL_SOCKET_IFNAME='=eno1' " in render_torchrun(plan_of(), "/", "p")[0].line


def test_render_torchrun_requires_a_command() -> None:
    with pytest.raises(TorchrunError, match="no command"):
        render_torchrun(plan_of(command=[]), "/", "p")


def test_line_passes_every_word_unchanged(
    stubs: Stubs, tmp_path: Path, hostile_folder: Path
) -> None:
    plan = plan_of(
        command=["python", "t.py", *WORDS], env=ENV, setup=["S=set # with a comment", "export S"]
    )
    done = bash(
        render_torchrun(plan, str(hostile_folder), stubs.add("python"))[0].line, stubs, tmp_path
    )
    assert done.returncode == 0, done.stderr
    [(_, argv, environ, folder)] = stubs.calls()
    assert argv[-len(WORDS) :] == WORDS
    assert {name: environ[name] for name in VALUES} == VALUES
    assert (folder, environ["S"]) == (str(hostile_folder), "set")
    assert not list(tmp_path.rglob("made"))


@pytest.mark.parametrize("word", [word for word in HOSTILE if word])
def test_line_enters_venv_and_conda_environment(stubs: Stubs, tmp_path: Path, word: str) -> None:
    folder = tmp_path / f"v {word}"
    (folder / "bin").mkdir(parents=True)
    shutil.copy(stubs.add("python"), folder / "bin" / "python")
    conda = stubs.bin / "conda"
    conda.write_text(f"#!/bin/bash\necho 'conda() {{ printf %s \"$2\" >{tmp_path}/activated; }}'\n")
    conda.chmod(0o755)
    stubs.environ["CONDA_EXE"] = str(conda)
    assert (
        bash(
            render_torchrun(plan_of(venv=str(folder)), "/", "p")[0].line, stubs, tmp_path
        ).returncode
        == 0
    )
    assert stubs.calls()[0][2]["VIRTUAL_ENV"] == str(folder)
    assert (
        bash(render_torchrun(plan_of(conda_env=word), "/", "p")[0].line, stubs, tmp_path).returncode
        == 0
    )
    assert (tmp_path / "activated").read_text() == word
    assert len(stubs.calls()) == 2


def test_ssh_and_remote_shell_pass_every_word_unchanged(
    stubs: Stubs, tmp_path: Path, hostile_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = stubs.bin / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nexec sh -c "$3"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", stubs.environ["PATH"])
    monkeypatch.chdir(hostile_folder)
    plan = plan_of(command=["python", "t.py", *WORDS], env=ENV, python=stubs.add("python"))
    assert backend.run(plan) == 0
    for _, argv, environ, folder in stubs.calls():
        assert argv[-len(WORDS) :] == WORDS
        assert {name: environ[name] for name in VALUES} == VALUES
        assert folder == str(hostile_folder)
    assert len(stubs.calls()) == 2
    assert not list(tmp_path.rglob("made"))


def test_newlines_are_refused() -> None:
    for field in (
        {"command": ["a\nb"]},
        {"env": ["A=a\nb"]},
        {"setup": ["a\nb"]},
        {"container": "docker:a\nb"},
    ):
        with pytest.raises(ValueError, match="newline"):
            plan_of(**field)
    with pytest.raises(DdpSlurmError, match="newline"):
        render_torchrun(plan_of(), "/a\nb", "python3")


def test_secrets_are_not_arguments(tmp_path: Path) -> None:
    plan = plan_of(env=["TOKEN=s3cret"], container="docker:image")
    for process in backend._processes(plan, 0):
        assert not any("s3cret" in word for word in process.argv)
    assert "s3cret" not in render_torchrun(plan, "/", "python3")[0].line.partition(" exec ")[2]


def test_hold_ranks_passes_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    program = Path(backend.__file__).with_name("hold_ranks.sh")
    done = subprocess.run([shellcheck, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_docker_gets_options_variables_and_command(stubs: Stubs, tmp_path: Path) -> None:
    stubs.add("docker")
    plan = plan_of(
        command=["python", "t.py", *WORDS],
        env=ENV,
        container="docker:torch:2",
        mount=["/da ta:/mnt:ro", "/x"],
    )
    command = render_torchrun(plan, str(tmp_path), "/not/used/python")[0]
    assert bash(command.line, stubs, tmp_path).returncode == 0
    assert bash(command.clean_up, stubs, tmp_path).returncode == 0
    (_, argv, environ, _), (_, clean_up, _, _) = stubs.calls()
    image = argv.index("torch:2")
    name = next(text for text in argv if text.startswith("--name=")).removeprefix("--name=")
    assert argv[image + 1 : image + 3] == ["python", "-m"]
    assert argv[-len(WORDS) :] == WORDS
    assert {name: environ[name] for name in VALUES} == VALUES
    passed = {"DDP_SLURM_WORLD_SIZE", "NCCL_SOCKET_IFNAME", *VALUES}
    names = [word for word in argv[:image] if re.fullmatch("--env=[A-Z0-9_]+", word)]
    assert {f"--env={name}" for name in passed} <= set(names)
    user = pwd.getpwuid(os.getuid()).pw_name
    assert [word for word in argv[:image] if word not in names] == [
        "run",
        "--rm",
        "--init",
        f"--name={name}",
        "--network=host",
        "--ipc=host",
        "--ulimit=memlock=-1",
        "--ulimit=stack=67108864",
        "--gpus=all",
        f"--user={os.getuid()}:{os.getgid()}",
        "--env=HOME=/tmp",
        f"--env=USER={user}",
        f"--mount=type=bind,source={tmp_path},target={tmp_path}",
        "--mount=type=bind,source=/da ta,target=/mnt,readonly",
        "--mount=type=bind,source=/x,target=/x",
        f"--workdir={tmp_path}",
    ]
    assert clean_up == ["rm", "--force", name]


def test_real_docker_client_accepts_the_options(stubs: Stubs, tmp_path: Path) -> None:
    if shutil.which("docker") is None:
        pytest.skip("no docker client")
    plan = plan_of(
        container="docker:torch:2", mount=["/da ta:/mnt:ro"], **{"container-network": "ddp"}
    )
    stubs.environ["DOCKER_HOST"] = f"unix://{tmp_path}/no.sock"
    done = bash(render_torchrun(plan, str(tmp_path), "python3")[0].line, stubs, tmp_path)
    # it parses all options before it looks for the engine, which does not exist
    assert "no.sock" in done.stderr


def test_overlay_network_uses_container_names(stubs: Stubs, tmp_path: Path) -> None:
    stubs.add("docker")
    plan = plan_of(container="docker:torch", **{"container-network": "ddp"})
    for command in render_torchrun(plan, str(tmp_path), "python3"):
        bash(command.line, stubs, tmp_path)
    (_, first, environ, _), (_, second, _, _) = stubs.calls()
    alias = next(text for text in first if text.startswith("--network-alias=")).removeprefix(
        "--network-alias="
    )
    assert f"--master-addr={alias}" in first
    assert f"--master-addr={alias}" in second
    assert "NCCL_SOCKET_IFNAME" not in environ
    assert "--network=ddp" in first
    make, join, token = network_commands(plan)
    stubs.environ["TOKEN"] = "SWM TKN"
    for text in (make, join, token):
        bash(text.partition(": ")[2], stubs, tmp_path)
    assert [text.partition(": ")[0] for text in (make, join, token)] == [
        "on gamma",
        "on beta",
        "where TOKEN is what this prints on gamma",
    ]
    assert [argv for _, argv, _, _ in stubs.calls()[2:]] == [
        ["swarm", "init", "--advertise-addr", "192.0.2.1"],
        ["network", "create", "--driver", "overlay", "--attachable", "ddp"],
        ["swarm", "join", "--advertise-addr", "192.0.2.2", "--token", "SWM TKN", "192.0.2.1:2377"],
        ["swarm", "join-token", "--quiet", "worker"],
    ]
    assert network_commands(plan_of()) == []
    node = plan.machines[0]._replace(address="fd00::1")
    assert network_commands(replace(plan, machines=(node, *plan.machines[1:])))[1].endswith(
        " '[fd00::1]:2377'"
    )


def test_node_refuses_a_folder_that_cannot_be_mounted(stubs: Stubs, tmp_path: Path) -> None:
    stubs.add("apptainer")
    for name in ("a,b", "a:b", 'a"b', "a\\b"):
        folder = tmp_path / name
        folder.mkdir()
        done = bash(
            render_torchrun(plan_of(container="apptainer:/i.sif"), str(folder), "p")[0].line,
            stubs,
            tmp_path,
        )
        assert (done.returncode, "cannot be mounted" in done.stderr) == (2, True)
    assert not stubs.calls()


JOB = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURMD_NODENAME": "gamma", "SLURM_NODEID": "1"}


def segments(plan: Plan, stubs: Stubs, folder: Path) -> list[list[str]]:
    """The words of each component's segment that the job script gives to srun."""
    stubs.add("srun")
    done = subprocess.run(
        ["bash", "-s"],
        input=render_sbatch(plan),
        env={**stubs.environ, **JOB},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    words = stubs.calls()[0][1]
    colon = words.index(":")
    return [words[:colon], words[colon + 1 :]]


def test_pyxis_and_apptainer_get_options_and_command(stubs: Stubs, tmp_path: Path) -> None:
    common = {"command": ["python", "t.py", *WORDS], "env": ENV, "mount": ["/da ta:/mnt:ro"]}
    plan = plan_of(container="pyxis:nv#torch", **common)
    step = {"PYTHONUNBUFFERED", *plan.job_env().to_environ(), *VALUES}
    own = [("NCCL_SOCKET_IFNAME==eno1", "GLOO_SOCKET_IFNAME=eno1"), ("NODE=be ta",)]
    for segment, variables in zip(segments(plan, stubs, tmp_path), own, strict=True):
        start = segment.index("--container-image=nv#torch")
        assert segment[start + 1 : start + 3] == [
            f"--container-mounts={tmp_path}:{tmp_path},/da ta:/mnt:ro",
            f"--container-workdir={tmp_path}",
        ]
        option, _, names = segment[start + 3].partition("=")
        # without a name here the image's own value of the variable would win
        assert (option, set(names.split(","))) == (
            "--container-env",
            step | {v.partition("=")[0] for v in variables},
        )
        assert segment[start + 4 :] == ["env", *variables, "python", "t.py", *WORDS]
    stubs.log.unlink()
    for segment in segments(plan_of(container="apptainer:/i m.sif", **common), stubs, tmp_path):
        start = segment.index("apptainer")
        assert not [word for word in segment if word.startswith("--container")]
        assert segment[start:] == [
            "apptainer",
            "exec",
            "--nv",
            "--bind",
            str(tmp_path),
            "--bind",
            "/da ta:/mnt:ro",
            "--pwd",
            str(tmp_path),
            "/i m.sif",
            "python",
            "t.py",
            *WORDS,
        ]


def test_launcher_torchrun_starts_one_task_a_node(stubs: Stubs, tmp_path: Path) -> None:
    plan = plan_of(launcher="torchrun", **{"cpus-per-task": "3"})
    first, second = segments(plan, stubs, tmp_path)
    assert first[2:6] == ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=3"]
    assert second[:4] == ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=6"]
    stubs.add("python")
    task = second[second.index("sh") :]
    stubs.log.unlink()
    assert subprocess.run(task, env={**stubs.environ, **JOB}).returncode == 0
    assert stubs.calls()[0][1] == [
        "-m",
        "torch.distributed.run",
        "--node-rank=1",
        "--nnodes=2",
        "--master-addr=gamma",
        "--master-port=10007",
        "--rdzv-id=7-0",
        "--rdzv-conf=timeout=180",
        "--max-restarts=0",
        "--nproc-per-node=2",
        "--no-python",
        "python",
        "t.py",
    ]


@pytest.mark.parametrize(
    ("failures", "calls", "status"), [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 3, 9)]
)
def test_launcher_torchrun_restarts_all_nodes(
    stubs: Stubs, tmp_path: Path, failures: int, calls: int, status: int
) -> None:
    srun = stubs.bin / "srun"
    srun.write_text(
        f'#!/bin/bash\necho "$@" >>{stubs.log}\n(($(wc -l <{stubs.log}) > {failures})) || exit 9\n'
    )
    srun.chmod(0o755)
    text = render_sbatch(plan_of(launcher="torchrun", **{"max-restarts": "2"}))
    done = subprocess.run(
        ["bash", "-s"], input=text, env={**stubs.environ, **JOB}, text=True, capture_output=True
    )
    lines = stubs.log.read_text().splitlines()
    assert (done.returncode, len(lines)) == (status, calls), done.stderr
    for attempt, line in enumerate(lines):
        assert f"--master-port={10007 + attempt} --rdzv-id=7-{attempt} " in line
    assert done.stderr.count("restart ") == calls - 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"container": "docker"},
            "'docker' is not ENGINE:IMAGE; the engines are docker, apptainer, pyxis",
        ),
        ({"container": "podman:x"}, "is not ENGINE:IMAGE"),
        ({"container": "docker:--privileged"}, "is not a docker image"),
        ({"container": "docker:a b"}, "is not a docker image"),
        ({"container": "docker:$(id)"}, "command substitution"),
        ({"container": "docker:x", "mount": ["data"]}, "'data' is not SOURCE"),
        ({"container": "docker:x", "mount": ["/a:/b:/c"]}, "is not SOURCE"),
        ({"container": "docker:x", "mount": ["/a:b"]}, "is not SOURCE"),
        ({"container": "docker:x", "mount": ["/a,b"]}, "cannot be mounted"),
        ({"launcher": "mpirun"}, "expected srun or torchrun, got 'mpirun'"),
    ],
)
def test_options_refused_at_load(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        plan_of(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mount": ["/a"]}, "need --container"),
        ({"container": "pyxis:x", "container-network": "n"}, "is docker's"),
        ({"container": "docker:x", "venv": "/v"}, "its own Python"),
    ],
)
def test_options_that_cannot_be_combined(options: dict[str, object], words: str) -> None:
    with pytest.raises(OptionsError, match=words):
        check_together(JobOptions.read(options))


def test_container_engine_must_fit_the_backend() -> None:
    with pytest.raises(RenderError, match="under Slurm use pyxis"):
        render_sbatch(plan_of(container="docker:x"))
    with pytest.raises(TorchrunError, match="plug-in of Slurm"):
        render_torchrun(plan_of(container="pyxis:x"), "/", "python3")
    with pytest.raises(TorchrunError, match="valid on one link only"):
        render_torchrun(plan_of(env=["MASTER_ADDR=fe80::1%eth0"]), "/", "python3")
