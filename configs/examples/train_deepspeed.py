"""Train a small byte-level model with DeepSpeed, on the source of Python's standard library.

torchrun --nproc-per-node 2 train_deepspeed.py --deepspeed_config ds_config.json
"""

import argparse
import os
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset


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


class Model(nn.Module):
    def __init__(self, width=192, num_layers=4):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        return self.head(self.layers(x, mask))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Model()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Bytes()
    )
    batches = iter(loader)
    while engine.global_steps < args.steps:
        tokens, targets = (part.to(engine.device) for part in next(batches))
        loss = functional.cross_entropy(engine(tokens).flatten(0, 1).float(), targets.flatten())
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
