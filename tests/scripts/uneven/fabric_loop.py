"""Fabric as its documentation writes it, in float64. Arguments: batch size, samples, micros."""

import json
import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE, SAMPLES, MICRO_BATCHES = map(int, sys.argv[1:4])

torch.set_default_dtype(torch.float64)
fabric = L.Fabric(accelerator="cpu", devices="auto", strategy="ddp")
fabric.launch()
torch.manual_seed(0)
x = torch.randn(SAMPLES, 6)
data = TensorDataset(x, (x.sin().sum(1) > 0).long())
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH_SIZE, shuffle=True))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
model, optimizer = fabric.setup(model, optimizer)
steps = seen = 0
for _epoch in range(4):
    for index, (inputs, targets) in enumerate(loader):
        is_last = (index + 1) % MICRO_BATCHES == 0 or index + 1 == len(loader)
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss / MICRO_BATCHES)
        seen += len(inputs)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
flat = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
result = {"rank": fabric.global_rank, "steps": steps, "seen": seen, "model": flat}
print("RESULT", json.dumps(result))
