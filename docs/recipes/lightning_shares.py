r"""Lightning with a share of the batch for each GPU that fits its speed.

ddp-slurm submit --global-batch-size 112 --balance speeds.yaml -- \
    python docs/recipes/lightning_shares.py

``plugins=[DdpSlurmEnvironment()]`` takes the ranks from srun or torchrun. Lightning's own sampler
would deal out equal shares, hence ``use_distributed_sampler=False`` and a BalancedSampler.
"""

import lightning as L
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_slurm.lightning import DdpSlurmEnvironment
from ddp_slurm.training import BalancedSampler


class Line(L.LightningModule):
    def __init__(self, sampler: BalancedSampler) -> None:
        super().__init__()
        self.line, self.sampler = nn.Linear(1, 1), sampler

    def on_train_epoch_start(self) -> None:
        self.sampler.set_epoch(self.current_epoch)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        # DDP takes the mean over ranks; the weight makes it the mean over samples.
        return mse_loss(self.line(x), y) * self.sampler.loss_weight(batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


environment = DdpSlurmEnvironment()
inputs = torch.linspace(0, 1, 1120).reshape(-1, 1)
data = TensorDataset(inputs, 3 * inputs + 1)
sampler = BalancedSampler(data, environment.planned_shares(112), environment.global_rank())
torch.manual_seed(0)
model = Line(sampler)
trainer = L.Trainer(
    plugins=[environment],
    strategy="ddp",
    devices="auto",  # all GPUs of the node, however many it has
    num_nodes=environment.node_count,
    use_distributed_sampler=False,
    max_epochs=15,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(data, batch_sampler=sampler))
weight, bias = (p.item() for p in model.line.parameters())
print(
    f"RESULT rank={trainer.global_rank} world={trainer.world_size} "
    f"weight={weight:.6f} bias={bias:.6f}",
    flush=True,
)
