"""A rank whose script has ended leaves with the script's status."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.processes import is_alive, running
from tests.waiting import wait_until

from .worlds import rank_environments

# In a world of one rank, and in a gloo group of two within this process: when the script has ended,
# a thread of gloo's is still busy, and then needs the interpreter.
BUSY_THREAD = """
import hashlib
import threading
import torch
from torch import distributed as dist
{begin}
store = dist.HashStore()
groups = {{}}


def join(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2)


threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
work = groups[0].allreduce([torch.ones(1)])
work.get_future().then(lambda future: hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000))
groups[1].allreduce([torch.ones(1)]).wait()
work.get_future().wait()
print("ends")
"""
IN_A_WORLD = """
from ddp_slurm.training import init_distributed
world = init_distributed(backend="gloo")
"""


def run(*argv: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, **rank_environments([1])[0]}
    command = [sys.executable, *argv]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


LATE_SIGNAL = """
import os, signal
from ddp_slurm.training import init_distributed


class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR2):
        kill(pid, number)


last = Last()
with init_distributed(backend="gloo"):
    print("ends")
"""


def test_signal_to_stop_does_not_kill_a_rank_that_ends() -> None:
    done = run("-c", LATE_SIGNAL)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


def test_script_ends_well_while_gloo_is_busy() -> None:
    done = run("-c", BUSY_THREAD.format(begin=IN_A_WORLD))
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


def test_uneven_script_ends_well_while_gloo_is_busy() -> None:
    done = run("-m", "ddp_slurm.training.scripts", "-c", BUSY_THREAD.format(begin=""))
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


# The agent of torchrun, as far as a rank sees it: its parent has that name.
TORCHRUN = """
import subprocess, sys

subprocess.run([sys.executable, "-c", sys.argv[1]])
"""
RANK = """
import os, time
from ddp_slurm.training import init_distributed

init_distributed(backend="gloo")
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_rank_dies_with_a_killed_torchrun(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text(TORCHRUN)
    command = [sys.executable, str(tmp_path / "torchrun"), RANK]
    environ = {**os.environ, **rank_environments([1])[0]}
    with running(command, env=environ) as torchrun:
        assert torchrun.stdout is not None
        rank = int(torchrun.stdout.readline())
        torchrun.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(rank), seconds=10)
