"""The torchrun style of the tutorials: LOCAL_RANK, init_process_group, DDP, DistributedSampler."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
inputs = torch.arange(84.0).reshape(84, 1) / 84
data = TensorDataset(inputs, 3 * inputs + 1)
sampler = DistributedSampler(data)
model = DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(40):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
weight, bias = (p.item() for p in model.module.parameters())
samples = len(list(sampler))
print(
    f"RESULT rank={dist.get_rank()} world={dist.get_world_size()} samples={samples} "
    f"weight={weight:.6f} bias={bias:.6f}"
)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo may abort a Python that ends: pytorch issue 190489
