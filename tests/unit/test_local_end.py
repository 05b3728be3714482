"""How local runs end: failures, signals, outputs that cannot be written; nothing is left."""

import fcntl
import functools
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_slurm.backends import processes

from ..processes import running
from ..waiting import wait_until
from .conftest import Command


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
    text = done.stdout + done.stderr
    assert text.count("cannot be written: No space left on device") == 1
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


@pytest.mark.parametrize(("early_seconds", "says"), [(0.1, True), (30.0, False)])
def test_rank_that_leaves_early_with_status_0_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    early_seconds: float,
    says: bool,
) -> None:
    monkeypatch.setattr(processes, "EARLY_SECONDS", early_seconds)
    ranks = [
        processes.Process(["sleep", seconds], dict(os.environ), f"[{rank}] ", f"rank {rank}")
        for rank, seconds in enumerate(("1", "0", "1"))
    ]
    assert processes.run_all(ranks, "rank").status == 0
    words = "[1] rank 1 ended with status 0 0.1 s ago; still running: 2 ranks"
    assert capsys.readouterr().err.count(words) == says


@pytest.mark.parametrize(("first_status", "says"), [(0, True), (3, False)])
def test_failure_after_an_end_with_status_0_names_both(
    capsys: pytest.CaptureFixture[str], first_status: int, says: bool
) -> None:
    """gloo's ranks fail at once where they wait for one that left; their lines do not name it."""
    commands = ("sleep 60", f"exit {first_status}", "sleep 0.5; exit 1")
    ranks = [
        processes.Process(["sh", "-c", command], dict(os.environ), "", f"rank {rank} on gamma")
        for rank, command in enumerate(commands)
    ]
    assert processes.run_all(ranks, "rank").status == (first_status or 1)
    printed = capsys.readouterr().err
    assert printed.count("rank 1 on gamma had ended with status 0 before") == says
    assert ("rank 2 on gamma exited with 1" in printed) == says
