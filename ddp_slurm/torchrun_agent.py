"""``python -m ddp_slurm.torchrun_agent``: torchrun that passes SIGUSR2 on to its ranks.

Slurm sends the signal that comes before the time limit to the step, and torchrun alone would die of
it. The ranks save a snapshot and stop, and torchrun then ends with them as usual.
"""

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType


def pass_on(signum: int, frame: FrameType | None) -> None:
    """Send the signal to all children.

    With proctrack/linuxproc Slurm signals the ranks as well, and they get it twice; with
    proctrack/cgroup this is the only way.
    """
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signum)


if __name__ == "__main__":
    # The ranks do not inherit a handler, as they would inherit "ignore".
    signal.signal(signal.SIGUSR2, pass_on)
    from torch.distributed.run import main

    try:
        main()
    finally:
        # A Python that ends gives up its handlers, and the signal would kill it.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
