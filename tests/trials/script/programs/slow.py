"""A user's training loop with something in it that costs time. Unaware of tuning."""

import argparse
import itertools
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

WIDTH = 256


class Samples(Dataset):
    def __init__(self, seconds, jitter):
        self.seconds, self.jitter = seconds, jitter

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        time.sleep(self.seconds + (self.jitter if index % 5 == 0 else 0.0))
        return torch.randn(WIDTH)


class Tiny(nn.Module):
    """Hundreds of operators on a few numbers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = x[:, :4]
        for _ in range(400):
            y = y * self.scale + 1e-3
        return y


class Again(nn.Module):
    """Layers that are computed again in the backward pass."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Changing(nn.Module):
    """Compiled for a value that is another one in each step."""

    def __init__(self):
        super().__init__()
        self.linear, self.step = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.step += 1
        return self.linear(x) * self.step if self.step > 0 else x


class Late(nn.Module):
    """Slower on one rank."""

    def __init__(self, rank):
        super().__init__()
        self.linear, self.rank = nn.Linear(WIDTH, WIDTH), rank

    def forward(self, x):
        time.sleep(0.05 if self.rank else 0.0)
        return self.linear(x)


class Talking(nn.Module):
    """Waits for all ranks in its forward pass, with more than it computes."""

    def __init__(self):
        super().__init__()
        self.linear, self.sums = nn.Linear(WIDTH, WIDTH), torch.zeros(1 << 23)

    def forward(self, x):
        dist.all_reduce(self.sums)
        return self.linear(x)


def model_of(a, rank):
    wide = nn.Sequential(nn.Linear(WIDTH, 2048), nn.Linear(2048, 2048), nn.Linear(2048, WIDTH))
    made = {"tiny": Tiny, "again": lambda: Again(WIDTH), "changing": Changing, "talking": Talking}
    model = Late(rank) if a.model == "late" else made.get(a.model, lambda: wide)()
    if a.model == "changing":
        model.compile(backend="eager", dynamic=False)
    return DistributedDataParallel(model, bucket_cap_mb=a.bucket) if dist.is_initialized() else model


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="wide")
    p.add_argument("--sample-s", type=float, default=0.0)
    p.add_argument("--jitter-s", type=float, default=0.0)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--bucket", type=float, default=25.0)
    p.add_argument("--optimizer", default="SGD")
    p.add_argument("--steps", type=int, default=10)
    a = p.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = model_of(a, int(os.environ.get("RANK", "0")))
    optimizer = getattr(torch.optim, a.optimizer)(model.parameters(), lr=1e-4)
    loader = DataLoader(Samples(a.sample_s, a.jitter_s), batch_size=a.batch)
    batches = iter(loader) if a.sample_s else itertools.repeat(torch.randn(a.batch, WIDTH))
    for _ in range(a.steps):
        loss = model(next(batches)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
