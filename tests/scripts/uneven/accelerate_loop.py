"""Accelerate as its documentation writes it, in float64. Arguments: batch size, samples, micros."""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE, SAMPLES, MICRO_BATCHES = map(int, sys.argv[1:4])

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=MICRO_BATCHES,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
)
x = torch.randn(SAMPLES, 6)
data = TensorDataset(x, (x.sin().sum(1) > 0).long())
loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
valid = DataLoader(data, batch_size=8)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
model, optimizer, loader, valid = accelerator.prepare(model, optimizer, loader, valid)
criterion = nn.CrossEntropyLoss()
steps = seen = correct = counted = 0
for _epoch in range(4):
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = criterion(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                steps += 1
            optimizer.step()
            optimizer.zero_grad()
        seen += len(inputs)
    model.eval()
    for inputs, targets in valid:
        with torch.no_grad():
            outputs = model(inputs)
        outputs, targets = accelerator.gather_for_metrics((outputs, targets))
        correct += (outputs.argmax(1) == targets).sum().item()
        counted += len(targets)
flat = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
result = {"rank": accelerator.process_index, "steps": steps, "seen": seen, "model": flat}
print("RESULT", json.dumps({**result, "correct": correct, "counted": counted}))
accelerator.end_training()
