"""Lightning as its documentation writes it, in float64. Arguments: batch size, samples, micros."""

import json
import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE, SAMPLES, MICRO_BATCHES = map(int, sys.argv[1:4])


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.seen = self.validated = 0

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        self.seen += len(inputs)
        loss = nn.functional.cross_entropy(self.layers(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.validated += len(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(SAMPLES, 6)
data = TensorDataset(x, (x.sin().sum(1) > 0).long())
loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
valid = DataLoader(data, batch_size=8)
model = Classifier()
trainer = L.Trainer(
    accelerator="cpu",
    devices="auto",
    strategy="ddp",
    precision="64-true",
    max_epochs=4,
    accumulate_grad_batches=MICRO_BATCHES,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader, valid)
flat = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
result = {"rank": trainer.global_rank, "steps": trainer.global_step, "seen": model.seen}
print("RESULT", json.dumps({**result, "model": flat, "validated": model.validated}))
