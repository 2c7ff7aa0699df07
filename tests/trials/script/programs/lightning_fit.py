"""A user's Lightning module and fit. Unaware of tuning."""

import argparse

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Words(pl.LightningModule):
    def __init__(self, accum):
        super().__init__()
        layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0) for _ in range(2)]
        self.net = nn.Sequential(nn.Embedding(64, 32), *layers, nn.Linear(32, 64))
        self.accum, self.losses = accum, []

    def training_step(self, batch, i):
        (x,) = batch
        loss = nn.functional.cross_entropy(self.net(x).float().flatten(0, 1), x.flatten())
        self.losses.append(loss.item())
        if len(self.losses) % self.accum == 0:
            step, mean = len(self.losses) // self.accum, sum(self.losses[-self.accum :]) / self.accum
            print(f"rank {self.global_rank}/{self.trainer.world_size} step {step} loss {mean:.6f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--accum", type=int, default=1)
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--devices", type=int, default=1)
    p.add_argument("--precision", default="32-true")
    a = p.parse_args()
    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=a.devices,
        strategy="ddp" if a.devices > 1 else "auto",
        precision=a.precision,
        accumulate_grad_batches=a.accum,
        max_steps=a.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Words(a.accum), DataLoader(TensorDataset(torch.randint(0, 64, (512, 16))), batch_size=a.batch))
