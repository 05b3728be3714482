"""A rank that stops at SIGUSR2 as if it had saved a snapshot.

Its argument is the folder in which it creates a file once it runs. The signal stays blocked: where
Slurm signals every process of a step, torchrun's agent sends a second one.
"""

import os
import signal
import sys
from pathlib import Path

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
(Path(sys.argv[1]) / f"running{os.environ['RANK']}").touch()
signal.sigwait({signal.SIGUSR2})
print(f"rank {os.environ['RANK']} stops", flush=True)
if os.environ["RANK"] == "0":
    Path(os.environ["DDP_SLURM_REQUEUE_MARKER"]).touch()
