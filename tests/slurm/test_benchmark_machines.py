"""The namespaces of the benchmarks: nothing stays of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PARENT = """
import os, time
from benchmarks.links_network import Machines, enter

with Machines(2) as machines:
    if os.fork() == 0:
        enter(machines.names[1])
        print(os.getpid(), *machines.names, flush=True)
    time.sleep(60)
"""


@pytest.mark.usefixtures("needs_lab")
def test_killed_benchmark_leaves_no_namespace() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    rank, *names = parent.stdout.readline().split()
    namespace = os.readlink(f"/proc/{rank}/ns/net")
    assert namespace != os.readlink("/proc/self/ns/net")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not Path(f"/proc/{rank}").exists(), "the end of the rank")
    assert not any(Path("/run/netns", name).exists() for name in names)
    assert namespace not in _mounted()


def _mounted() -> str:
    """What the mounts of all processes hold."""
    tables = []
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            tables.append(table.read_text())
        except OSError:  # it has ended
            continue
    return "".join(tables)
