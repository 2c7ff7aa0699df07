"""Training programs of unknown users, one per name; all unaware of tuning. Each prints its losses."""

import contextlib
import copy
import os
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

STEPS, VOCAB, DIM = 4, 50, 32


def show(step, loss):
    print(f"step {step + 1} loss {loss.item():.9f}", flush=True)


class Items(Dataset):
    """Sentences; with ``draws``, augmented at random."""

    epoch = 0

    def __init__(self, draws=False):
        self.x = torch.randint(0, VOCAB, (64, 13), generator=torch.Generator().manual_seed(1))
        self.draws = draws

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        row = self.x[(i + self.epoch) % len(self.x)]
        return row.roll(random.randrange(13)) if self.draws else row


class Stream(IterableDataset):
    def __iter__(self):
        yield from Items().x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, counts=False):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Dropout(0.1))
        self.counts = counts
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.calls += 1
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, again=False, counts=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers, self.again = nn.ModuleList(Layer(counts) for _ in range(3)), again

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.head(x)


def next_token(model, x):
    return cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def constants(kind=""):
    """Everything a constant, accumulation over two micro-batches; ``kind`` selects the deviation."""
    model = Decoder(again=kind == "recomputes", counts=kind == "counts")
    if kind == "compiles":
        model.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = Stream() if kind == "iterable" else Items(draws=kind == "draws")
    loader = DataLoader(data, batch_size=4, shuffle=None if kind == "iterable" else True)
    batches = iter(loader)
    if kind == "draws_early":
        torch.rand(3)
    if hasattr(torch.amp, "GradScaler"):
        scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaler")
    else:  # before PyTorch 2.3
        scaler = torch.cuda.amp.GradScaler(enabled=False)
    for step in range(STEPS):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind in ("autocast", "scaler")):
                loss = next_token(model, next(batches))
            scaler.scale(loss / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        show(step, loss)


def epochs():
    """A data set that the program changes between epochs, and an evaluation with its loader from the same line."""
    model, data = Decoder(), Items()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train, valid = (DataLoader(part, batch_size=32) for part in (data, Items()))
    for epoch in range(2):
        data.epoch = 5 * epoch
        for step, x in enumerate(train):
            loss = next_token(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            show(2 * epoch + step, loss)
        model.eval()
        with torch.no_grad():
            print("valid", sum(next_token(model, x).item() for x in valid))
        model.train()


def gan():
    """Two models, two optimisers, losses outside of the forward pass."""
    make = nn.Sequential(nn.ConvTranspose2d(8, 16, 4), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))
    judge = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4))
    first, second = (torch.optim.Adam(model.parameters(), 2e-4) for model in (make, judge))
    criterion = nn.BCEWithLogitsLoss()
    for step, (real,) in enumerate(DataLoader(TensorDataset(torch.randn(64, 3, 8, 8)), batch_size=8, shuffle=True)):
        second.zero_grad()
        fake = make(torch.randn(8, 8, 1, 1))
        loss = criterion(judge(real), torch.ones(8, 1, 1, 1))
        (loss + criterion(judge(fake.detach()), torch.zeros(8, 1, 1, 1))).backward()
        second.step()
        first.zero_grad()
        criterion(judge(fake), torch.ones(8, 1, 1, 1)).backward()
        first.step()
        show(step, loss)
        if step + 1 == STEPS:
            break


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x):
        return x + self.line(x)


def images():
    """Convolutions with batch norm, an EMA copy, and the whole model in a file at the end."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), *[Residual() for _ in range(3)], nn.Flatten(), nn.Linear(1024, 5))
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(64, 3, 16, 16), torch.randint(0, 5, (64,)))
    for step, (x, y) in enumerate(DataLoader(data, batch_size=8, shuffle=True)):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            average = copy.deepcopy(model)
        for mine, other in zip(average.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(other.data, 0.1)
        show(step, loss)
        if step + 1 == STEPS:
            break
    with torch.no_grad():
        print("averaged", float(average.eval()(x).abs().mean()) > 0)
    torch.save(model, os.devnull)


def parallel(kind=""):
    """DDP; with ``no_sync``, accumulation under it."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = Items()
    batches = iter(DataLoader(data, batch_size=4, sampler=DistributedSampler(data)))
    for step in range(STEPS):
        if kind == "no_sync":
            with model.no_sync():
                (next_token(model, next(batches)) / 2).backward()
        with contextlib.nullcontext():
            loss = next_token(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    globals()[sys.argv[1]](*sys.argv[2:])
