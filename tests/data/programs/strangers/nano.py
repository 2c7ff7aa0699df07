# constants with a configurator, accumulation divided by the ranks, as in nanoGPT
import os

import torch

batch_size = 4
gradient_accumulation_steps = 8
block_size = 16
eval_batch_size = 4
exec(open("configurator.py").read())
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
gradient_accumulation_steps //= ranks
model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))
model = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    for _ in range(gradient_accumulation_steps):
        x = torch.randint(0, 50, (batch_size, block_size))
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        (loss / gradient_accumulation_steps).backward()
    optimizer.step()
    optimizer.zero_grad()
