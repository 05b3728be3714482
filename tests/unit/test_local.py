"""The local backend: the planned ranks as processes of this machine."""

import fcntl
import functools
import json
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_slurm.backends.local import LocalError, step_processes, visible_gpus
from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan import make_plan

from ..processes import running
from ..waiting import wait_until
from .conftest import Command, Stub

REPORT = """
import json, os, sys
from dataclasses import asdict
from ddp_slurm.rank_env import RankEnv
print(json.dumps({**asdict(RankEnv.from_environ()), "node": os.environ["SLURMD_NODENAME"],
                  "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
                  "argv": sys.argv[1:], "a": os.environ.get("A")}))
"""


def reports(done: "subprocess.CompletedProcess[str]") -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return sorted(
        (json.loads(line[line.index("{") :]) for line in done.stdout.splitlines()),
        key=lambda r: r["rank"],
    )


def test_seven_ranks_as_under_slurm(uneven: Path, submit: Command, tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    done = submit(
        "--backend",
        "local",
        "--env",
        "A=x y",
        "--",
        "report.py",
        "it's",
        "$(id)",
        env={"SLURM_JOB_ID": "9", "SLURM_PROCID": "3", "RANK_IS_NOT_SET": "1"},
    )
    found = reports(done)
    assert [
        (r["rank"], r["node"], r["local_rank"], r["local_world_size"], r["node_rank"])
        for r in found
    ] == [
        (0, "gamma", 0, 1, 0),
        (1, "beta", 0, 2, 1),
        (2, "beta", 1, 2, 1),
        (3, "alpha", 0, 4, 2),
        (4, "alpha", 1, 4, 2),
        (5, "alpha", 2, 4, 2),
        (6, "alpha", 3, 4, 2),
    ]
    assert {(r["world_size"], r["master_addr"], r["a"]) for r in found} == {(7, "127.0.0.1", "x y")}
    assert len({r["master_port"] for r in found}) == 1
    assert found[0]["argv"] == ["it's", "$(id)"]
    labels = sorted(line.split("]")[0] for line in done.stdout.splitlines())
    assert labels == [
        "[0 gamma",
        "[1 beta",
        "[2 beta",
        "[3 alpha",
        "[4 alpha",
        "[5 alpha",
        "[6 alpha",
    ]


def test_step_processes_whole_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes:\n  - {name: z, gpus: 1}\n"
        "  - {name: 'a[1-2]', gpus: 2, interface: eno1, env: {NCCL_DEBUG: INFO, X: node}}\n"
    )
    options = {"command": ["python", "t.py"], "env": ["A=b c", "X=job"], "global_batch_size": "5"}
    plan = make_plan(Cluster.load(path), JobOptions.read(options))
    kept = {"PATH": "/bin", "OMP_NUM_THREADS": "3"}
    found = list(step_processes(plan, {**kept, "SLURM_PROCID": "8", "SLURM_CPU_BIND": "x"}))
    last = dict(found[4].environ)
    assert (found[4].argv, found[4].name, found[4].label) == (
        [sys.executable, "t.py"],
        "rank 4 on a2",
        "[4 a2] ",
    )
    assert 0 < int(last.pop("MASTER_PORT")) < 65536
    assert last == {
        **kept,
        **plan.job_env().to_environ(),
        "PYTHONUNBUFFERED": "1",
        "A": "b c",
        "X": "node",
        "NCCL_DEBUG": "INFO",
        "MASTER_ADDR": "127.0.0.1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "5",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_NODELIST": "a[1-2],z",
        "SLURM_JOB_NODELIST": "a[1-2],z",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "z",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "a[1-2]",
        "SLURM_PROCID": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURMD_NODENAME": "a2",
        "SLURM_GTIDS": "3,4",
    }
    own = {**options, "nodes": "z", "env": ["MASTER_PORT=29555"]}
    plain = next(step_processes(make_plan(Cluster.load(path), JobOptions.read(own)), {})).environ
    assert (plain["OMP_NUM_THREADS"], plain["SLURM_NTASKS"], plain["MASTER_PORT"]) == (
        "1",
        "1",
        "29555",
    )
    assert not [name for name in plain if "HET" in name]


@pytest.mark.parametrize(
    ("visible", "listing", "gpus"),
    [
        (None, "echo 'GPU 0: X'; echo '  MIG 1g.10gb'; echo 'GPU 1: X'", ("0", "1")),
        (None, "echo 'GPU 0: X'; echo 'Unable to determine the device handle'; exit 15", ()),
        ("3,GPU-1c9f", "echo 'GPU 0: X'", ("3", "GPU-1c9f")),
        ("", "echo 'GPU 0: X'", ()),
        ("-1", "echo 'GPU 0: X'", ()),
        ("2,-1,3", "echo 'GPU 0: X'", ("2",)),
    ],
)
def test_visible_gpus(
    visible: str | None,
    listing: str,
    gpus: tuple[str, ...],
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub("nvidia-smi", f'[[ "$*" == --list-gpus ]] || exit 2; {listing}')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == gpus


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"container": "docker:x"}, "--container cannot be combined with"),
        ({"launcher": "torchrun"}, "--launcher cannot be combined with"),
        ({"setup": "module load cuda"}, "--setup cannot be combined with"),
        ({"conda-env": "torch"}, "--conda-env cannot be combined with"),
        ({"venv": "no-such-folder"}, "--venv: 'no-such-folder' has no bin/python"),
    ],
)
def test_options_of_other_backends_are_refused(
    uneven: Path, options: dict[str, str], words: str
) -> None:
    plan = make_plan(
        Cluster.load(uneven), JobOptions.read({"command": ["python", "t.py"], **options})
    )
    with pytest.raises(LocalError, match=words):
        list(step_processes(plan, {}))


@pytest.mark.parametrize("command", ["python train.py", "train.py"])
def test_the_python_of_a_virtual_environment(
    uneven: Path, submit: Command, tmp_path: Path, command: str
) -> None:
    python = tmp_path / "my env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$0 $VIRTUAL_ENV $1"\n')
    python.chmod(0o755)
    (python.parent / "python3").symlink_to("python")
    done = submit(
        "--backend",
        "local",
        "--gpus",
        "1",
        "--venv",
        str(tmp_path / "my env"),
        "--",
        *command.split(),
    )
    assert done.returncode == 0, done.stderr
    assert (
        re.sub("python3 ", "python ", done.stdout)
        == f"[0 gamma] {python} {tmp_path / 'my env'} train.py\n"
    )


def test_gpus_of_the_machine_are_dealt_out_node_by_node(
    uneven: Path, submit: Command, tmp_path: Path, stub: Stub
) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    stub("nvidia-smi", 'for i in 0 1 2 3; do echo "GPU $i: NVIDIA X (UUID: GPU-$i)"; done')
    found = reports(submit("--backend", "local", "--gpus", "3", "--", "report.py"))
    assert [(r["devices"], r["device_index"]) for r in found] == [("0", 0), ("1,2", 0), ("1,2", 1)]
    done = submit("--backend", "local", "--", "report.py")
    assert done.returncode == 2
    assert "the plan has 7 GPUs, this machine has 4; use --gpus 4" in done.stderr
    assert (
        len(
            reports(
                submit("--backend", "local", "--", "report.py", env={"CUDA_VISIBLE_DEVICES": ""})
            )
        )
        == 7
    )


def test_the_cluster_without_a_file_is_this_machine(
    submit: Command, tmp_path: Path, stub: Stub
) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    assert [r["world_size"] for r in reports(submit("--backend", "local", "--", "report.py"))] == [
        1
    ]
    assert len(reports(submit("--backend", "local", "--gpus", "2", "--", "report.py"))) == 2
    done = submit("--backend", "local", "--gpus", "999999999", "--", "report.py")
    assert (
        done.returncode,
        "--gpus: 999999999 ranks are too many for one machine" in done.stderr,
    ) == (2, True)
    stub("nvidia-smi", 'for i in 0 1 2; do echo "GPU $i: NVIDIA X"; done')
    assert len(reports(submit("--backend", "local", "--", "report.py"))) == 3


def is_running(pid: str) -> bool:
    """Not a zombie, which only waits for its parent, here init, to take notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def child_folder(tmp_path: Path) -> Iterator[Path]:
    """Ranks leave their own and their child's process id here; none may survive the test."""
    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder

    def alive() -> list[int]:
        return [int(path.name) for path in folder.iterdir() if is_running(path.name)]

    try:
        # A process that was sent SIGKILL dies when it is scheduled.
        wait_until(lambda: not alive(), lambda: f"the end of {alive()}", seconds=20)
    finally:
        for pid in alive():
            os.kill(pid, signal.SIGKILL)


STAY = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
for pid in (os.getpid(), child.pid):
    pathlib.Path("pids", str(pid)).touch()
print("up", flush=True)
if os.environ["SLURM_PROCID"] == "4" and sys.argv[1:] == ["fail"]:
    while len(os.listdir("pids")) < 14:
        time.sleep(0.01)
    print("rank 4 failed", file=sys.stderr)
    sys.exit(3)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "ignores", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"]
)
def test_one_failing_rank_stops_all(
    uneven: Path, submit: Command, tmp_path: Path, child_folder: Path, ignores: str
) -> None:
    (tmp_path / "stay.py").write_text(ignores + STAY)
    (tmp_path / "tools/sleep").symlink_to("/bin/sleep")
    done = submit("--backend", "local", "--", "stay.py", "fail")
    assert done.returncode == 3
    assert "[4 alpha] rank 4 failed" in done.stderr
    assert "rank 4 on alpha exited with 3" in done.stderr
    assert "stopping 6 ranks\n" in done.stderr
    assert done.stderr.count(" on alpha ") == 1, "the others ended because they were stopped"


CLOSES = """
import os, signal, sys
if os.environ["SLURM_PROCID"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("x" * 50000 + " closed"))
    open("ready", "w").close()
    signal.pause()
open("ready").read()
sys.exit(3)
"""


def test_a_rank_that_is_stopped_may_close_what_it_has_open(
    uneven: Path, submit: Command, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(CLOSES)
    os.mkfifo(tmp_path / "ready")
    done = submit("--backend", "local", "--gpus", "2", "--", "rank.py")
    assert done.returncode == 3
    assert done.stderr.endswith("x closed\n")


ENDS_BEFORE = """
import os, pathlib, sys, time
first = pathlib.Path("first")
if os.environ["SLURM_PROCID"] == "0":
    assert sys.stdin.read() == ""
    pathlib.Path("new").write_text(f"/proc/{os.getpid()}")
    pathlib.Path("new").rename(first)
    sys.exit()
while not first.exists() or os.path.exists(first.read_text()):
    time.sleep(0.01)
sys.exit(3)
"""


def test_a_rank_that_has_ended_well_does_not_hide_a_failure(
    uneven: Path, submit: Command, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(ENDS_BEFORE)
    done = submit("--backend", "local", "--gpus", "2", "--", "rank.py")
    assert done.returncode == 3, done.stderr
    assert "rank 1 on beta exited with 3" in done.stderr
    assert "stopping" not in done.stderr


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGHUP, 129),
        (signal.SIGINT, 130),
        (signal.SIGQUIT, 131),
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_interrupted_nothing_is_left(
    uneven: Path, tmp_path: Path, child_folder: Path, number: signal.Signals, status: int
) -> None:
    # killed with SIGKILL itself, it cannot stop its ranks' children; the ranks still end with it
    text = (
        STAY
        if number != signal.SIGKILL
        else STAY.replace('subprocess.Popen(["sleep", "600"])', "os")
    )
    (tmp_path / "stay.py").write_text(
        text.replace("child.pid", "os.getpid()") if number == signal.SIGKILL else text
    )
    command = [sys.executable, "-m", "ddp_slurm.submit", "--backend", "local", "--", "stay.py"]
    with running(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as launcher:
        assert launcher.stdout is not None
        assert all("up" in launcher.stdout.readline() for _ in range(7))
        launcher.send_signal(number)
        assert launcher.wait(timeout=30) == status
        launcher.stdout.read()  # ends when the last rank has closed it


def test_a_closed_terminal_stops_all_and_is_recorded(
    uneven: Path, tmp_path: Path, child_folder: Path
) -> None:
    (tmp_path / "stay.py").write_text(STAY)
    command = [sys.executable, "-m", "ddp_slurm.submit", "--backend", "local", "--", "stay.py"]
    controller, terminal = os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=take_terminal,
    ) as launcher:
        os.close(terminal)
        with os.fdopen(controller, "rb", buffering=0) as screen:
            shown = b""
            while shown.count(b"up\r\n") < 7:
                shown += screen.read(4096)
        assert launcher.wait(timeout=30) == 129  # closing the terminal sent SIGHUP
    (marker,) = tmp_path.glob("ddp_slurm_runs/*/exit")
    assert marker.read_text().startswith("status=129\nterminated=yes\n")
    assert "stopping 7 ranks" in (marker.parent / "log").read_text()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_stays_ignored(
    uneven: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """As under nohup, and in the background of a script."""
    os.mkfifo(tmp_path / "go")
    (tmp_path / "rank.py").write_text("print('up', flush=True); open('go').read()")
    command = [sys.executable, "-m", "ddp_slurm.submit", "--backend", "local"]
    command += ["--gpus", "1", "--", "rank.py"]
    ignore = functools.partial(signal.signal, number, signal.SIG_IGN)
    with running(command, cwd=tmp_path, preexec_fn=ignore) as launcher:
        assert launcher.stdout is not None
        assert any("up" in line for line in launcher.stdout)
        launcher.send_signal(number)
        (tmp_path / "go").open("w").close()
        assert launcher.wait(timeout=30) == 0


TALKS = "for i in range(30_000): print(i, flush=i < 100)"
"""More than a pipe holds: a rank that nobody reads would hang."""


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def closed_terminal() -> int:
    controller, terminal = os.openpty()
    os.close(controller)
    return terminal


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("output", [closed_pipe, closed_terminal, full_disk])
def test_a_broken_output_ends_nothing(
    uneven: Path, tmp_path: Path, output: Callable[[], int]
) -> None:
    (tmp_path / "rank.py").write_text(TALKS)
    command = [
        sys.executable,
        "-m",
        "ddp_slurm.submit",
        "--backend",
        "local",
        "--gpus",
        "1",
        "--",
        "rank.py",
    ]
    writer = output()
    try:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(writer)
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("ddp_slurm_runs/*/log")
    assert log.read_text().splitlines()[-1] == "[0 gamma] 29999"
    assert (log.parent / "exit").read_text().startswith("status=0\n")


def test_a_full_log_ends_nothing_and_is_reported_once(
    uneven: Path, submit: Command, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(f"{TALKS}\nimport sys; sys.exit(3)")
    (tmp_path / "log").symlink_to("/dev/full")
    done = submit("--backend", "local", "--gpus", "1", "--output", "log", "--", "rank.py")
    assert done.returncode == 3
    assert (done.stdout + done.stderr).count("log cannot be written: No space left on device") == 1
    assert done.stdout.endswith("[0 gamma] 29999\n")


def test_a_log_that_cannot_be_created_is_an_error(
    uneven: Path, submit: Command, tmp_path: Path
) -> None:
    (tmp_path / "log").symlink_to("no-such-folder/log")
    done = submit("--backend", "local", "--gpus", "1", "--output", "log", "--", "true")
    assert done.returncode == 2
    assert (
        f"error: --output: {tmp_path}/log: cannot be written: No such file or directory\n"
        in done.stderr
    )


def test_the_exit_status_stays_when_the_reader_goes_away(uneven: Path, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("open('gone').read(); exit(3)")
    command = [
        sys.executable,
        "-m",
        "ddp_slurm.submit",
        "--backend",
        "local",
        "--gpus",
        "1",
        "--",
        "rank.py",
    ]
    os.mkfifo(tmp_path / "gone")
    with running(command, cwd=tmp_path) as launcher:
        assert launcher.stdout is not None
        assert "kept in" in launcher.stdout.readline()
        launcher.stdout.close()
        (tmp_path / "gone").open("w").close()
        assert launcher.wait(timeout=60) == 3
    (log,) = tmp_path.glob("ddp_slurm_runs/*/log")
    assert "rank 0 on gamma exited with 3" in log.read_text()


def test_a_rank_killed_by_a_signal(uneven: Path, submit: Command, tmp_path: Path) -> None:
    (tmp_path / "kill.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    done = submit("--backend", "local", "--gpus", "1", "--", "kill.py")
    assert done.returncode == 137
    assert "rank 0 on gamma was killed by SIGKILL" in done.stderr


def test_long_and_unfinished_lines_are_kept(uneven: Path, submit: Command, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("import sys; sys.stdout.write('x' * 300000 + '\\nend')")
    done = submit("--backend", "local", "--gpus", "1", "--", "long.py")
    assert done.stdout == f"[0 gamma] {'x' * 300000}\n[0 gamma] end\n"


def test_a_command_that_does_not_exist(uneven: Path, submit: Command) -> None:
    done = submit("--backend", "local", "--", "no-such-program")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-program: cannot be started: No such file or directory" in done.stderr
