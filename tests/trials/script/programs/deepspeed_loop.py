"""A user's training loop with DeepSpeed's engine. Unaware of tuning."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--stage", type=int, default=1)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--steps", type=int, default=4)
    a = p.parse_args()
    torch.manual_seed(0)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes; gloo reduces as well
    model = nn.Sequential(nn.Embedding(64, 32), *[Block() for _ in range(3)], nn.Linear(32, 64))
    config = {
        "train_micro_batch_size_per_gpu": a.batch,
        "gradient_accumulation_steps": a.accum,
        "zero_optimization": {"stage": a.stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank, generator = engine.global_rank, torch.Generator().manual_seed(engine.global_rank)
    for step in range(1, a.steps + 1):
        mean = 0.0
        for _ in range(a.accum):
            x = torch.randint(0, 64, (a.batch, 16), generator=generator)
            loss = nn.functional.cross_entropy(engine(x).float().flatten(0, 1), x.flatten())
            mean += loss.item() / a.accum
            engine.backward(loss)
            engine.step()
        print(f"rank {rank}/{dist.get_world_size()} step {step} loss {mean:.6f}", flush=True)
    dist.destroy_process_group()
