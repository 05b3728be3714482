"""Writes what this rank finds into FOLDER/RANK.json; rank 4 exits with 3 after all others."""

import fcntl
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from ddp_slurm.rank_env import RankEnv

FAILING_RANK = 4

folder = Path(sys.argv[1])
env = RankEnv.from_environ()
lock = open(folder / f"{env.rank}.lock", "w")  # noqa: SIM115 # held until this process has ended
fcntl.flock(lock, fcntl.LOCK_EX)
new = folder / f"{env.rank}.new"
new.write_text(json.dumps({"rank_env": asdict(env), "environ": dict(os.environ)}))
new.rename(folder / f"{env.rank}.json")
if env.rank == FAILING_RANK:
    while len(list(folder.glob("*.json"))) < env.world_size:
        time.sleep(0.05)
    for rank in range(env.world_size):
        if rank != FAILING_RANK:
            with open(folder / f"{rank}.lock") as other:
                fcntl.flock(other, fcntl.LOCK_EX)
    time.sleep(2)  # submitit's process around the command ends after it
    sys.exit(3)
