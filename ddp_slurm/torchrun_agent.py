"""``python -m ddp_slurm.torchrun_agent``: torchrun that passes SIGUSR2 on to its ranks, where it would die of it.

Slurm sends the signal that comes before the time limit to the step; the ranks save a snapshot and stop, torchrun then
ends with them as usual.
"""

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType


def pass_on(signum: int, frame: FrameType | None) -> None:
    """Send the signal to all children.

    Under proctrack/linuxproc Slurm reaches the ranks as well, and they get it twice; under proctrack/cgroup only so.
    """
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signum)


if __name__ == "__main__":
    # a handler is not inherited by the ranks, as "ignore" would be
    signal.signal(signal.SIGUSR2, pass_on)
    from torch.distributed.run import main

    main()
