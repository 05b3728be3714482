"""A plain DDP script of which rank 5 fails in the first attempt, in the middle of the others' collective."""

import os
import sys

import torch
import torch.distributed as dist

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 5 and attempt == "0":
    print("rank 5 fails", flush=True)
    sys.exit(9)
dist.all_reduce(total)
print(f"RESULT rank={dist.get_rank()} attempt={attempt} total={total.item():g}")
dist.destroy_process_group()
