"""Hugging Face Accelerate as its own documentation writes it."""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
inputs = torch.arange(84.0).reshape(84, 1) / 84
loader = DataLoader(TensorDataset(inputs, 3 * inputs + 1), batch_size=4, shuffle=True)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
seen = 0
for epoch in range(40):
    for x, y in loader:
        seen += len(x) if epoch == 0 else 0
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
weight, bias = (p.item() for p in accelerator.unwrap_model(model).parameters())
print(
    f"RESULT rank={accelerator.process_index} world={accelerator.num_processes} samples={seen} "
    f"weight={weight:.6f} bias={bias:.6f}"
)
accelerator.end_training()
sys.stdout.flush()
os._exit(0)  # gloo may abort a Python that ends: pytorch issue 190489
