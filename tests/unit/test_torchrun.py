"""torchrun's lines: every word arrives unchanged, and nothing in it is executed."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_slurm.backends import torchrun as backend
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.render import render_sbatch
from ddp_slurm.render.torchrun import NodeCommand, TorchrunError, render_torchrun

from .recording import ENV, HOSTILE, JOB, VALUES, WORDS, Stubs, bash, plan_of, segments


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


def test_every_node_gets_the_token_and_no_argument_has_it() -> None:
    processes = backend._processes(plan_of(container="docker:image"), 0)
    texts = [str(process.lifeline) for process in processes]
    [token] = {found for text in texts for found in re.findall("DDP_SLURM_TOKEN=([0-9a-f]+)", text)}
    assert len(token) == 32
    assert all(text.count(token) == 1 and "--env=DDP_SLURM_TOKEN " in text for text in texts)
    assert not any(token in word for process in processes for word in process.argv)
    assert "DDP_SLURM_TOKEN" not in backend.describe(plan_of())


def test_hold_ranks_passes_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    program = Path(backend.__file__).with_name("hold_ranks.sh")
    done = subprocess.run([shellcheck, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


AGENT = """
import signal, subprocess, sys, time
rank = subprocess.Popen(["sleep", "600"], start_new_session=True)  # as torchrun starts its ranks
def end_the_rank(number, frame):
    time.sleep(0.5)
    rank.terminate()
    sys.exit(rank.wait())
signal.signal(signal.SIGTERM, end_the_rank)
print(rank.pid, flush=True)
signal.pause()
"""


def test_stopped_torchrun_has_time_to_end_its_ranks() -> None:
    line = f"( true && exec {sys.executable} -c {shlex.quote(f'exec({AGENT!r})')} )"
    argv = [*backend.holder_argv()[:-2], "60", "5"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, text=True, **pipes) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(backend.holder_input(NodeCommand("node", line, "true")) + "\n")
        holder.stdin.flush()
        rank = int(holder.stdout.readline())
        holder.stdin.close()  # the submitting machine is gone
        holder.wait(30)
    has_ended = not Path(f"/proc/{rank}").exists()
    if not has_ended:
        os.kill(rank, signal.SIGKILL)
    assert has_ended


def test_launcher_torchrun_starts_one_task_a_node(stubs: Stubs, tmp_path: Path) -> None:
    plan = plan_of(launcher="torchrun", **{"cpus-per-task": "3"})
    first, second = segments(plan, stubs, tmp_path)
    assert first[3:7] == ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=3"]
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
        '#!/bin/bash\ncase " $* " in *" --overlap "* | *" --version "*) exit ;; esac\n'
        f"echo ${{@//$'\\n'/ }} >>{stubs.log}\n"
        f"(($(wc -l <{stubs.log}) > {failures})) || exit 9\n"
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


LATE_SIGNAL = """
import os, runpy, signal, sys, types

for name in ("torch", "torch.distributed", "torch.distributed.run"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["torch.distributed.run"].main = lambda: print("ends")


class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR2):
        kill(pid, number)


last = Last()
runpy.run_module("ddp_slurm.torchrun_agent", run_name="__main__")
"""


def test_signal_to_stop_does_not_kill_an_agent_that_ends() -> None:
    command = [sys.executable, "-c", LATE_SIGNAL]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
