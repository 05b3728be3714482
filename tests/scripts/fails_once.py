"""A plain DDP script whose rank 5 fails in the first attempt, while the others are in a collective.

Its argument is a file by which the next attempt knows of the first.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
attempt = 2 if Path(sys.argv[1]).exists() else 1
dist.barrier()
if dist.get_rank() == 5 and attempt == 1:
    Path(sys.argv[1]).touch()
    print("rank 5 fails", flush=True)
    sys.exit(9)
dist.all_reduce(total)
print(f"RESULT rank={dist.get_rank()} attempt={attempt} total={total.item():g}")
dist.destroy_process_group()
