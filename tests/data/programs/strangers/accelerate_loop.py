# Accelerate; an option called like nothing that is known, and one that is never read
import argparse

import torch
from accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--bsz", type=int, default=6)
parser.add_argument("--accumulate", type=int, default=None)
parser.add_argument("--mp", choices=["no", "bf16"], default="no")
parser.add_argument("--batch-size", type=int, default=6, help="of an earlier version: never read")
args = parser.parse_args()
accelerator = Accelerator(gradient_accumulation_steps=args.accumulate or 3, cpu=True, mixed_precision=args.mp)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters())
samples = torch.utils.data.TensorDataset(torch.randn(1024, 8))
loader = torch.utils.data.DataLoader(samples, batch_size=args.bsz, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
