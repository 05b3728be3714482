"""The style of torchrun's tutorials, in float64, on GPUs where there are any.

Arguments: batch size, samples, micro-batches.
"""

import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH_SIZE, SAMPLES, MICRO_BATCHES = map(int, sys.argv[1:4])

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
has_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
if has_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if has_gpu else "gloo")
x = torch.randn(SAMPLES, 6)
data = TensorDataset(x, (x.sin().sum(1) > 0).long())
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
criterion = nn.CrossEntropyLoss()
steps = seen = 0
for epoch in range(4):
    sampler.set_epoch(epoch)
    model.train()
    for index, (inputs, targets) in enumerate(loader):
        inputs, targets = inputs.to(device), targets.to(device)
        is_last = (index + 1) % MICRO_BATCHES == 0 or index + 1 == len(loader)
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = criterion(model(inputs), targets)
            loss = loss + 1e-3 * sum((p**2).sum() for p in model.parameters())
            (loss / MICRO_BATCHES).backward()
        seen += len(inputs)
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
flat = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
print("RESULT", json.dumps({"rank": dist.get_rank(), "steps": steps, "seen": seen, "model": flat}))
dist.destroy_process_group()
