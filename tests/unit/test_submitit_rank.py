"""The ranks of a submitit job: their place, their end after SIGTERM, commands as functions."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

submitit = pytest.importorskip("submitit")

from submitit.helpers import TorchDistributedEnvironment  # noqa: E402

from ddp_slurm.backends.submitit import rank as submitit_rank  # noqa: E402
from ddp_slurm.backends.submitit.executor import HetSlurmJobEnvironment  # noqa: E402
from ddp_slurm.rank_env import port_of_job  # noqa: E402

from .test_rank_env import RELEASES, WORLDS, recorded  # noqa: E402


def test_a_rank_loads_little() -> None:
    code = "import sys, ddp_slurm.backends.submitit\n"
    code += "print([name for name in ('jinja2', 'yaml') if name in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", WORLDS)
def test_the_place_of_each_rank(name: str, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [host for host, _ in WORLDS[name]]
    sizes = [size for _, size in WORLDS[name]]
    expected = [
        (rank, local, node)
        for rank, (node, local) in enumerate(
            (n, i) for n, size in enumerate(sizes) for i in range(size)
        )
    ]
    found = []
    for environ in recorded(name, release)[0]:
        monkeypatch.setattr(os, "environ", {**environ, "SUBMITIT_EXECUTOR": "het_slurm"})
        env = submitit.JobEnvironment()
        assert isinstance(env, HetSlurmJobEnvironment)
        found.append((env.global_rank, env.local_rank, env.node))
        assert env.hostnames == hosts
        assert (env.num_tasks, env.num_nodes) == (sum(sizes), len(hosts))
        assert env.local_world_size == sizes[env.node]
        torch_env = TorchDistributedEnvironment()
        assert (torch_env.master_addr, torch_env.rank, torch_env.world_size) == (
            hosts[0],
            env.global_rank,
            sum(sizes),
        )
        assert (torch_env.local_rank, torch_env.local_world_size) == (
            env.local_rank,
            sizes[env.node],
        )
        torch_env.export(set_cuda_visible_devices=False)
        assert env.master_addr == hosts[0]  # also after the function has exported its own set
        assert env.local_world_size == sizes[env.node]
        assert f"local_rank={env.local_rank}({sizes[env.node]})" in repr(env)
    assert found == expected


def test_without_an_exported_port_it_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = recorded("het_1_2_4", "22.05")[0][4]
    monkeypatch.setattr(os, "environ", {k: v for k, v in environ.items() if k != "MASTER_PORT"})
    assert HetSlurmJobEnvironment().master_port == port_of_job(int(environ["SLURM_JOB_ID"]))


RANK = """
import os, signal, sys
from ddp_slurm.backends.submitit import rank as submitit_rank
submitit_rank.TERM_GRACE_SECONDS = submitit_rank.OTHERS_GRACE_SECONDS = 0.2
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda *_: None)
watch = submitit_rank.SignalWatch(
    signal.SIGUSR2, is_rank_0=sys.argv[1] == "0", may_restart=len(sys.argv[1]) == 1
)
watch.start()
for word in sys.argv[2:]:
    os.kill(os.getpid(), getattr(signal, word))
print("goes on", flush=True)
%s
"""
# Holds the main thread where no handler of Python's can run, as a collective does.
HUNG = "import ctypes; ctypes.CDLL(None).pause()"


@pytest.mark.parametrize(
    "main_thread", ["signal.pause(); signal.pause()", HUNG + "; ctypes.CDLL(None).pause()"]
)
@pytest.mark.parametrize("words", [["3", "SIGTERM"], ["0", "SIGTERM"], ["3", "SIGUSR2", "SIGTERM"]])
def test_a_rank_ends_soon_after_sigterm(words: list[str], main_thread: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANK % main_thread, *words],
        env={**os.environ, "SLURM_JOB_ID": "48"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "words", [["3", "SIGTERM", "SIGUSR2"], ["0", "SIGUSR2", "SIGTERM"], ["3", "SIGUSR2"]]
)
def test_a_rank_that_is_to_be_requeued_does_not(words: list[str]) -> None:
    waits = "import time; time.sleep(1); os._exit(7)"  # longer than the grace
    done = subprocess.run(
        [sys.executable, "-c", RANK % waits, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("rank", "squeue", "ends"),
    [
        ("0", "echo 'RUNNING   2026-11-28T15:04:09  '", False),
        ("0", "echo 'RUNNING   N/A  '", True),
        ("0", "echo 'COMPLETING   2026-11-28T15:04:09  '", True),  # cancelled after all
        ("0", "echo 'slurm_load_jobs error' >&2; exit 1", True),
        ("00", "echo 'RUNNING   2026-11-28T15:04:09  '", True),  # no restarts are left
    ],
)
def test_rank_0_of_a_preempted_job_signals_all(
    stub: Callable[..., Path], tmp_path: Path, rank: str, squeue: str, ends: bool
) -> None:
    stub("squeue", f'[[ "$*" == *--jobs=48* ]] && {{ {squeue}; }}')
    stub("scancel", f'echo "$*" > {tmp_path}/sent; kill -USR2 $PPID')
    waits = "import time; time.sleep(2); os._exit(7)"  # longer than the grace
    done = subprocess.run(
        [sys.executable, "-c", RANK % waits, rank, "SIGTERM"],
        env={**os.environ, "SLURM_JOB_ID": "48"},
        timeout=60,
    )
    assert done.returncode == (128 + signal.SIGTERM if ends else 7)
    assert (tmp_path / "sent").exists() is not ends
    if not ends:
        assert (tmp_path / "sent").read_text() == "--signal=USR2 48\n"


def test_a_forked_workers_sigterm_is_not_the_ranks() -> None:
    forks = """
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
os.waitpid(child, 0)
import time; time.sleep(1); os._exit(7)"""
    done = subprocess.run(
        [sys.executable, "-c", RANK % forks, "3"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7


def test_a_command_as_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = signal.getsignal(signal.SIGUSR2)
    try:
        assert submitit_rank.RankCommand(["true"])() == 0
        with pytest.raises(subprocess.CalledProcessError, match="returned non-zero exit status 3"):
            submitit_rank.RankCommand(["sh", "-c", "exit 3"])()
        # submitit's signal reaches the command with its default action, and not this process.
        os.kill(os.getpid(), signal.SIGUSR2)
        with pytest.raises(subprocess.CalledProcessError, match="SIGUSR2"):
            submitit_rank.RankCommand(["sh", "-c", "kill -USR2 $$"])()
    finally:
        signal.signal(signal.SIGUSR2, before)
