"""A rank that stops at SIGUSR2 as if it had saved a snapshot. Its argument is the folder in which it says that it runs."""

import os
import signal
import sys
from pathlib import Path


def stop(signum: int, frame: object) -> None:
    print(f"rank {os.environ['RANK']} stops", flush=True)
    if os.environ["RANK"] == "0":
        Path(os.environ["DDP_SLURM_REQUEUE_MARKER"]).touch()
    os._exit(0)


signal.signal(signal.SIGUSR2, stop)
(Path(sys.argv[1]) / f"running{os.environ['RANK']}").touch()
while True:
    signal.pause()
