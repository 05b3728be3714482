"""A rank that stops at SIGUSR2 as if it had saved a snapshot. Its argument is the folder in which it says that it runs.

The handler only takes note: where Slurm signals every process of a step, torchrun's agent sends a second signal.
"""

import os
import signal
import sys
import time
from pathlib import Path

asked: list[int] = []
signal.signal(signal.SIGUSR2, lambda signum, frame: asked.append(signum))
(Path(sys.argv[1]) / f"running{os.environ['RANK']}").touch()
while not asked:
    time.sleep(0.02)
print(f"rank {os.environ['RANK']} stops", flush=True)
if os.environ["RANK"] == "0":
    Path(os.environ["DDP_SLURM_REQUEUE_MARKER"]).touch()
os._exit(0)  # a second signal would end an interpreter that is closing down
