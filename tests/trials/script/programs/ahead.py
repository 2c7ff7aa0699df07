"""Two workers load batches in 0.2 s each, so a step takes 0.1 s in the long run; its first steps find batches ready."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 4 * 400

    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.full((16,), index / 1600)


model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for number, batch in enumerate(DataLoader(Slow(), batch_size=4, num_workers=2)):
    if number < 2:
        time.sleep(0.6)  # such as compilation
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.06)
