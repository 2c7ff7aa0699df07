"""Train a small byte-level language model with DistributedDataParallel, on the source of Python's standard library.

torchrun --nproc-per-node 2 train.py --batch-size 4 --accumulation 2
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Bytes(Dataset):
    def __init__(self, seq_length):
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.seq_length = seq_length

    def __len__(self):
        return (len(self.data) - 1) // self.seq_length

    def __getitem__(self, index):
        piece = self.data[index * self.seq_length : (index + 1) * self.seq_length + 1].long()
        return piece[:-1], piece[1:]


class Model(nn.Module):
    def __init__(self, width, num_layers, seq_length, recompute):
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(seq_length, width)
        layer = lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)  # noqa: E731
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.head = nn.Linear(width, 256)
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.recompute else layer(x, mask)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4, help="samples of a device's forward pass")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--out", type=Path, help="folder for the trained weights")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(args.width, args.layers, args.seq_length, args.recompute).to(device))
    run = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = Bytes(args.seq_length)
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data), num_workers=args.workers)
    dtype = getattr(torch, args.dtype)

    batches = iter(loader)
    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        total = 0.0
        for micro in range(args.accumulation):
            model.require_backward_grad_sync = micro == args.accumulation - 1
            tokens, targets = (part.to(device) for part in next(batches))
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = functional.cross_entropy(run(tokens).flatten(0, 1).float(), targets.flatten())
            (loss / args.accumulation).backward()
            total += loss.item() / args.accumulation
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total:.6f}, {1000 * (time.perf_counter() - start):.2f} ms", flush=True)
    if args.out is not None and dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.out / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
