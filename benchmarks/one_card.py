"""Starts a benchmark as two ranks that share one GPU, where only one is at hand. Needs root.

    python -m benchmarks.one_card -- benchmarks/gpu_checks.py
    python -m benchmarks.one_card --parts 60,30 -- -m benchmarks.cards --ratios 1 --sizes 512

Each rank is a host of its own: NCCL refuses one GPU for two ranks of one host, and sends over
sockets between hosts. Where CUDA's Multi-Process Service runs, both compute at the same time, each
on its part of the GPU (``--parts``, in percent); otherwise they take turns. What the cards of two
hosts do side by side is not measured by it, but shares, exactness, graphs and memory are tried over
NCCL.
"""

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ddp_slurm.parent import die_with_parent
from ddp_slurm.training.process_group import facts

PORT = "29517"
RANK = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--parts", default="50,50", help="of the GPU, in percent, a rank each")
parser.add_argument("--no-mps", action="store_true", help="the ranks take turns")
parser.add_argument("command", nargs="+", help="a script or -m MODULE, and its arguments")


@contextmanager
def multi_process_service(is_wanted: bool) -> Iterator[dict[str, str]]:
    """The variables that lead to it; none where it does not start."""
    if not is_wanted:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        environ = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        control = ["nvidia-cuda-mps-control"]
        try:
            subprocess.run([*control, "-d"], env={**os.environ, **environ}, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no Multi-Process Service, the ranks take turns: {error}", flush=True)
            yield {}
            return
        try:
            yield environ
        finally:
            subprocess.run(control, input=b"quit\n", env={**os.environ, **environ}, check=False)


def start(command: list[str], parts: list[str], shared: dict[str, str]) -> int:
    """Run the ranks; the first exit status that is not 0 ends all."""
    ranks = []
    for rank, part in enumerate(parts):
        environ = {
            **os.environ,
            **shared,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(parts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NODE_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": PORT,
            "SLURMD_NODENAME": f"host{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": part,
        }
        words = [f"host{rank}", sys.executable, "-m", "benchmarks.one_card", "--", *command]
        ranks.append(subprocess.Popen([*RANK, *words], env=environ))
    try:
        while any(rank.poll() is None for rank in ranks):
            if failed := [rank.returncode for rank in ranks if rank.returncode]:
                return failed[0]
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
    return max(rank.wait() for rank in ranks)


def become(command: list[str]) -> None:
    """The benchmark, whose start does not object to the GPU that another rank has too."""
    die_with_parent()
    describe = facts._describe_gpu
    facts._describe_gpu = lambda index: replace(describe(index), uuid="")
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        become(arguments.command)
        return
    with multi_process_service(not arguments.no_mps) as shared:
        sys.exit(start(arguments.command, arguments.parts.split(","), shared))


if __name__ == "__main__":
    main()
