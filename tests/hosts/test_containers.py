"""``--container``: two hosts with 1 and 2 ranks in a real engine, without GPUs.

The engine is one of the test's own. Its image is a Debian root that came from no registry: Python's
packages, torch and this package are mounted.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ..waiting import wait_until
from .conftest import Hosts
from .engine import IMAGE, ROOT, Engine, import_root, job_words, need, run_job, start_engine
from .engine import start_job as start

TRAIN = ROOT / "synthetic_data_example" / "train.py"
WAITS = "import os, time\nopen(os.environ['RANK'], 'w').close()\ntime.sleep(300)\n"
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def options(engine: Engine, debian_root: Path) -> list[str]:
    import_root(engine, debian_root, IMAGE)
    return job_words(f"docker:{IMAGE}")


def test_two_hosts_train_to_the_end_and_resume(
    engine: Engine, options: list[str], tmp_path: Path
) -> None:
    shutil.copy(TRAIN, tmp_path)
    words = ["python", "train.py"]
    status, output = run_job(engine.environ, tmp_path, options, *words, "1", "1")
    assert status == 0, output
    assert "finished: step 16" in output
    assert (tmp_path / "snapshot.pt").stat().st_uid == os.getuid()
    status, output = run_job(engine.environ, tmp_path, options, *words, "2", "1")
    assert status == 0, output
    assert "finished: step 32" in output
    assert "epoch 1/2" not in output  # the first one is in the snapshot
    engine.check_nothing_is_left()


def test_a_rank_that_dies_ends_both_containers(
    engine: Engine, options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "dies.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '2':\n    sys.exit(3)\ntime.sleep(300)\n"
    )
    status, output = run_job(engine.environ, tmp_path, options, "python", "dies.py")
    assert status != 0, output
    assert "exitcode  : 3" in output
    assert "torchrun on two exited with" in output
    engine.check_nothing_is_left()


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_leaves_no_container(
    engine: Engine, options: list[str], tmp_path: Path, number: signal.Signals, expected: int
) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    job = start(engine.environ, tmp_path, options, "python", "waits.py")
    wait_until(lambda: all((tmp_path / rank).exists() for rank in "012"), "the ranks", seconds=300)
    job.send_signal(number)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == expected, output
    engine.check_nothing_is_left()


def test_docker_stop_of_one_container_ends_the_job(
    engine: Engine, options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    job = start(engine.environ, tmp_path, options, "python", "waits.py")
    wait_until(lambda: all((tmp_path / rank).exists() for rank in "012"), "the ranks", seconds=300)
    (name,) = [name for name in engine.containers() if name.endswith("-two")]
    engine.docker("stop", "--time", "60", name)
    output, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert "got signal: 15" in output  # torchrun, which then ends its ranks
    assert "torchrun on two exited with" in output
    engine.check_nothing_is_left()


def test_what_docker_refuses_is_printed(engine: Engine, options: list[str], tmp_path: Path) -> None:
    words = [*options, "--mount", "/does/not/exist"]
    status, output = run_job(engine.environ, tmp_path, words, "python", "train.py")
    assert status == 125, output
    assert "bind source path does not exist: /does/not/exist" in output
    engine.check_nothing_is_left()


def test_containers_meet_in_a_swarms_overlay_network(
    make_hosts: Callable[..., Hosts], debian_root: Path, tmp_path: Path
) -> None:
    """Two engines on two hosts, joined by the commands that --dry-run prints."""
    need("dockerd", "docker")
    hosts = make_hosts("one", "two")
    cluster = hosts.cluster_yaml({"one": 1, "two": 2})
    words = [*job_words(f"docker:{IMAGE}"), "--cluster", str(cluster), "--container-network", "ddp"]
    shutil.copy(TRAIN, tmp_path)

    def submit(*more: str) -> str:
        done = subprocess.run(
            [*words, *more, "--", "python", "train.py", "1", "1"],
            cwd=tmp_path,
            env=hosts.environ,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with (
        start_engine(hosts.engine("one"), hosts.netns("one")) as one,
        start_engine(hosts.engine("two"), hosts.netns("two")) as two,
    ):
        import_root(one, debian_root, IMAGE)
        import_root(two, debian_root, IMAGE)
        prefix = "# once, for the containers' network, "
        lines = submit("--dry-run").splitlines()
        on_one, on_two, ask = (line.partition(": ")[2] for line in lines if line.startswith(prefix))
        run_shell(one, on_one)
        run_shell(two, on_two, TOKEN=run_shell(one, ask).strip())
        assert "finished: step 16" in submit()
        one.check_nothing_is_left()
        two.check_nothing_is_left()
        # Without these the engines would remember each other.
        two.docker("swarm", "leave")
        one.docker("swarm", "leave", "--force")


def run_shell(engine: Engine, line: str, **variables: str) -> str:
    done = subprocess.run(
        ["sh", "-c", line],
        env={**engine.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_apptainer_trains_to_the_end(debian_root: Path, tmp_path: Path) -> None:
    need("apptainer")
    shutil.copy(TRAIN, tmp_path)
    words = job_words(f"apptainer:{debian_root}")
    status, output = run_job(dict(os.environ), tmp_path, words, "python", "train.py", "1", "1")
    assert status == 0, output
    assert "finished: step 16" in output


def test_ctrl_c_ends_apptainer(debian_root: Path, tmp_path: Path) -> None:
    need("apptainer")
    (tmp_path / "waits.py").write_text(WAITS)
    words = job_words(f"apptainer:{debian_root}")
    job = start(dict(os.environ), tmp_path, words, "python", "waits.py")
    wait_until(lambda: all((tmp_path / rank).exists() for rank in "012"), "the ranks", seconds=300)
    job.send_signal(signal.SIGINT)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 130, output
    assert not [line for line in command_lines() if str(tmp_path) in line]


def command_lines() -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
