"""Train a small byte-level model with Lightning, on the source of Python's standard library.

python fit_lightning.py --devices 2 --batch_size 2 --accumulate_grad_batches 4
"""

import argparse
import os
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Bytes(Dataset):
    def __init__(self, seq_length=128):
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.seq_length = seq_length

    def __len__(self):
        return (len(self.data) - 1) // self.seq_length

    def __getitem__(self, index):
        piece = self.data[index * self.seq_length : (index + 1) * self.seq_length + 1].long()
        return piece[:-1], piece[1:]


class Model(pl.LightningModule):
    def __init__(self, width=192, num_layers=4, lr=3e-4):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.lr = lr

    def training_step(self, batch):
        tokens, targets = batch
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        scores = self.head(self.layers(self.embedding(tokens), mask))
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--accumulate_grad_batches", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--out_dir", default=".", help="folder for logs and checkpoints")
    args = parser.parse_args()

    pl.seed_everything(0)
    loader = DataLoader(Bytes(), args.batch_size, shuffle=True, num_workers=args.num_workers)
    trainer = pl.Trainer(
        devices=args.devices,
        precision=args.precision,
        accumulate_grad_batches=args.accumulate_grad_batches,
        max_steps=args.max_steps,
        default_root_dir=args.out_dir,
    )
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()
