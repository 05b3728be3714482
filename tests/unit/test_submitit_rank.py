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


REQUEUES = """
import os, signal, sys
from submitit.core.utils import DelayedSubmission, JobPaths
from ddp_slurm.backends.submitit.rank import HetSlurmJobEnvironment

class Saves:
    def __call__(self): signal.pause()
    def checkpoint(self): return DelayedSubmission(Saves())

delayed = DelayedSubmission(Saves())
delayed.set_timeout(60, 1)
paths = JobPaths(sys.argv[1], "48", 0)
paths.folder.mkdir(exist_ok=True)
HetSlurmJobEnvironment()._handle_signals(paths, delayed)
os.kill(os.getpid(), signal.SIGUSR2)
"""


def test_requeue_is_not_disturbed_by_other_signals(
    stub: Callable[..., Path], tmp_path: Path
) -> None:
    """The signal comes again, and SIGTERM after Slurm has accepted; to scontrol as well."""
    signals = "for name in USR2 TERM; do kill -$name $PPID $$; done"
    stub("scontrol", f'echo "$*" >>{tmp_path}/calls; {signals}; /bin/sleep 0.2')
    rank_0 = recorded("het_1_2_4", "22.05")[0][0]
    done = subprocess.run(
        [sys.executable, "-c", REQUEUES, tmp_path / "jobs"],
        env={**rank_0, "PATH": os.environ["PATH"], "SLURM_JOB_ID": "48"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 255, done.stderr  # submitit's own
    assert (tmp_path / "calls").read_text() == "requeue 48\n"


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
