"""What a rank does after SIGTERM: a preemption lets it save, anything else ends it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RANK = """
import os, signal, sys
from ddp_slurm import term_signal
term_signal.RANK_0_GRACE_SECONDS = term_signal.OTHERS_GRACE_SECONDS = 0.2
term_signal.AGAIN_SECONDS = 0.1
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda *_: None)
rank = sys.argv[1]
watch = term_signal.TermWatch(
    signal.SIGUSR2,
    is_rank_0=rank in ("0", "00"),
    is_first_of_node=rank in ("0", "00", "1"),
    saves=rank != "00",
    all_save=rank == "4",
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
    "words",
    [
        ["3", "SIGTERM", "SIGUSR2"],
        ["0", "SIGUSR2", "SIGTERM"],
        ["4", "SIGUSR2", "SIGTERM"],
        ["3", "SIGUSR2"],
    ],
)
def test_a_rank_that_is_to_be_requeued_does_not(words: list[str]) -> None:
    waits = "import time; time.sleep(1); "  # longer than the grace
    ends = "os._exit(8 if term_signal.has_term() else 7)"  # a failure while it saves is reported
    done = subprocess.run(
        [sys.executable, "-c", RANK % (waits + ends), *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7


PREEMPTED = "echo 'RUNNING   2026-11-28T15:04:09  '"
RUNNING = "echo 'RUNNING   N/A  '"


@pytest.mark.parametrize(
    ("rank", "squeue", "ends"),
    [
        ("0", PREEMPTED, False),
        ("0", RUNNING, True),
        ("0", "echo 'SIGNALING   2026-11-28T15:04:09  '", False),  # while Slurm signals the ranks
        ("0", f"{RUNNING}; {PREEMPTED}", False),  # the second component is preempted first
        ("0", f"ls asked && {PREEMPTED} || {{ touch asked; {RUNNING}; }}", False),
        ("0", "echo 'COMPLETING   2026-11-28T15:04:09  '", True),  # cancelled after all
        ("0", f"{PREEMPTED}; echo 'CANCELLED   N/A  '", True),
        ("0", "echo 'slurm_load_jobs error' >&2; exit 1", True),
        ("1", PREEMPTED, False),  # its node has the signal before that of rank 0
        ("3", PREEMPTED, True),  # another of its node asks
        ("00", PREEMPTED, True),  # no restarts are left
    ],
)
def test_first_rank_of_a_node_signals_all_of_a_preempted_job(
    stub: Callable[..., Path], tmp_path: Path, rank: str, squeue: str, ends: bool
) -> None:
    stub("squeue", f'[[ "$*" == *--jobs=48* ]] && {{ {squeue}; }}')
    stub("scancel", f'echo "$*" > {tmp_path}/sent; kill -USR2 $PPID')
    waits = "import time; time.sleep(2); os._exit(7)"  # longer than the grace
    done = subprocess.run(
        [sys.executable, "-c", RANK % waits, rank, "SIGTERM"],
        env={**os.environ, "SLURM_JOB_ID": "48"},
        cwd=tmp_path,
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
