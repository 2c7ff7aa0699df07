"""A user's training loop with Accelerate. Unaware of tuning."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--accum", type=int, default=1)
    p.add_argument("--steps", type=int, default=4)
    a = p.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=a.accum, cpu=True)
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(64, 32), *layers, nn.Linear(32, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randint(0, 64, (512, 16))), batch_size=a.batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done, mean = 0, 0.0
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.flatten())
            mean += loss.item() / a.accum
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            rank = f"{accelerator.process_index}/{accelerator.num_processes}"
            print(f"rank {rank} step {done} loss {mean:.6f}", flush=True)
            mean = 0.0
            if done == a.steps:
                break
    accelerator.end_training()
