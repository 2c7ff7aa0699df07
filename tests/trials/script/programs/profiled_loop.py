"""A user's loop on two ranks: mixed precision, an evaluation that reads a value per step, and a rank that is slow."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, SLOW_S = 40, 0.03


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 8)
        dist.all_reduce(self.head.weight.data)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        mean = x.detach().mean()
        dist.all_reduce(mean)
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = TensorDataset(torch.randn(16 * STEPS, 64), torch.randint(0, 8, (16 * STEPS,)))
    for x, y in DataLoader(rows, batch_size=8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if dist.get_rank() == 1:
            time.sleep(SLOW_S)
        optimizer.step()
        print(loss.item(), flush=True)


if __name__ == "__main__":
    main()
