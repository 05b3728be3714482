"""Runs scripts on gloo ranks: forks them from a process that has imported what they need once.

Reads a line of JSON for each run: ``{"argv": [...], "environs": [{...}, ...], "folder": "..."}``.
Answers with the exit statuses; each rank's output is in FOLDER/RANK.log.
"""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def rank(argv: list[str], environ: dict[str, str], log: Path) -> None:
    """In a forked process, which it ends."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environ)
    status = 1
    try:
        from ddp_slurm.training.scripts.__main__ import main, run

        if argv[0] == "--uneven":
            status = main(argv[1:])
        else:
            run(argv)
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    import torch

    for name in ("lightning.pytorch", "lightning.fabric", "accelerate", "transformers.trainer"):
        with contextlib.suppress(ImportError):
            __import__(name)
    torch.set_num_threads(1)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        pids = []
        for number, environ in enumerate(request["environs"]):
            pid = os.fork()
            if pid == 0:
                rank(request["argv"], environ, Path(request["folder"]) / f"{number}.log")
            pids.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    serve()
