"""A user's training loop in plain PyTorch, under torchrun's variables if they are there. Unaware of tuning."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

SEQ, VOCAB, DIM = 16, 64, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.recompute == "none" else self.again(block, x)
        return self.head(x)

    def again(self, block, x):
        return checkpoint(block, x, use_reentrant=self.recompute == "reentrant")


class Odd(Model):
    """Raises on any inspection."""

    def children(self):
        raise RuntimeError("children are not available")

    def modules(self):
        raise RuntimeError("modules are not available")


def wrapped(model, a):
    if a.wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    if a.compile == "model":
        model = torch.compile(model, backend="eager")
    if a.compile == "blocks":
        for block in model.blocks:
            block.compile(backend="eager")
    return DistributedDataParallel(model) if dist.is_initialized() else model


def main(a):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    held = torch.ones(a.hold, dtype=torch.uint8)
    model = wrapped((Odd if a.odd else Model)(a.recompute), a)
    parameters = list(nn.Module.parameters(model)) if not a.odd else list(model.embed.parameters())
    half = len(parameters) // 2 if a.optimizers == 2 else len(parameters)
    optimizers = [torch.optim.AdamW(part, lr=1e-3) for part in (parameters[:half], parameters[half:]) if part]
    if a.compile == "optimizer":
        optimizers[0].step = torch.compile(optimizers[0].step, backend="eager")
    if hasattr(torch.amp, "GradScaler"):
        scaler = torch.amp.GradScaler("cpu", enabled=a.scaler)
    else:  # before PyTorch 2.3
        scaler = torch.cuda.amp.GradScaler(enabled=False)
    tokens = torch.randint(0, VOCAB, (1024, SEQ), generator=torch.Generator().manual_seed(rank))
    batches = iter(DataLoader(TensorDataset(tokens), batch_size=a.batch))
    for step in range(1, a.steps + 1):
        mean = 0.0
        for _ in range(a.accum):
            (x,) = next(batches)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.bf16):
                loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.flatten()) / a.accum
            scaler.scale(loss).backward()
            mean += loss.item()
        if step == a.overflow_at:
            parameters[0].grad.fill_(torch.inf)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        print(f"rank {rank}/{world} step {step} loss {mean:.6f}", flush=True)
        if step == a.fail_at:
            raise MemoryError("as if this were real")
    assert len(held) == a.hold
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--accum", type=int, default=1)
    p.add_argument("--optimizers", type=int, default=1)
    p.add_argument("--fail-at", type=int, default=0)
    p.add_argument("--hold", type=int, default=0, help="bytes")
    p.add_argument("--overflow-at", type=int, default=0)
    p.add_argument("--recompute", choices=["none", "reentrant", "full"], default="none")
    p.add_argument("--wrap", choices=["ddp", "fsdp2"], default="ddp")
    p.add_argument("--compile", choices=["off", "model", "blocks", "optimizer"], default="off")
    for flag in ("bf16", "scaler", "odd"):
        p.add_argument(f"--{flag}", action="store_true")
    main(p.parse_args())
