"""Training programs of several frameworks with the same options; none of them knows of tune-cluster.

python train.py --framework accelerate --batch 4 --recompute --bf16
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 2048, 128, 6, 4, 128
IMAGE, CLASSES = 64, 100


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small GPT with its loss."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


class Residual(nn.Module):
    """Two convolutions around which the input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm1(self.first(x)))
        return torch.relu(x + self.norm2(self.second(inner)))


class Images(nn.Module):
    """A small residual network with its loss."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.stem = nn.Conv2d(3, 48, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(48) for _ in range(4))
        self.head = nn.Linear(48, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        scores = self.head(x.mean((2, 3)))
        return nn.functional.cross_entropy(scores.float(), torch.zeros(len(images), dtype=torch.long))


def batches(options: argparse.Namespace) -> Iterator[torch.Tensor]:
    while True:
        if options.framework == "images":
            yield torch.randn(options.batch, 3, IMAGE, IMAGE)
        else:
            yield torch.randint(0, VOCABULARY, (options.batch, LENGTH))


def plain(options: argparse.Namespace) -> None:
    """torch alone, DistributedDataParallel, or FSDP2 by layers as torchtitan wraps them."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model: Any = (Images if options.framework == "images" else Model)(options.recompute)
    if options.framework == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif options.framework == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _, batch in zip(range(options.steps), batches(options), strict=False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16):
            loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.is_initialized():
        dist.destroy_process_group()


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences for the frameworks that want a data set."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": tokens, "labels": tokens}


def trainer(options: argparse.Namespace) -> None:
    """The Trainer of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        output_dir=os.environ.get("TMPDIR", "/tmp"),
        per_device_train_batch_size=options.batch,
        gradient_checkpointing=options.recompute,
        bf16=options.bf16,
        max_steps=options.steps,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens()).train()


def accelerate(options: argparse.Namespace) -> None:
    """A loop with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if options.bf16 else "no")
    model = Model(options.recompute)
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=options.batch)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader)
    for _, batch in zip(range(options.steps), loader, strict=False):
        accelerator.backward(model(batch["input_ids"]))
        optimizer.step()
        optimizer.zero_grad()


def lightning(options: argparse.Namespace) -> None:
    """A Lightning module."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(options.recompute)

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.model(batch["input_ids"])  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    fit = pl.Trainer(
        accelerator="cpu",
        precision="bf16-mixed" if options.bf16 else "32-true",
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fit.fit(Module(), torch.utils.data.DataLoader(Tokens(), batch_size=options.batch))


def deepspeed(options: argparse.Namespace) -> None:
    """DeepSpeed's engine."""
    import deepspeed as ds

    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "zero_optimization": {"stage": options.zero},
        "bf16": {"enabled": options.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    model = Model(options.recompute)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _, batch in zip(range(options.steps), batches(options), strict=False):
        engine.backward(engine(batch))
        engine.step()
    dist.destroy_process_group()


PROGRAMS = {"trainer": trainer, "accelerate": accelerate, "lightning": lightning, "deepspeed": deepspeed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--framework", choices=["torch", "images", "ddp", "fsdp2", *PROGRAMS], default="torch", help="what trains"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    PROGRAMS.get(options.framework, plain)(options)


if __name__ == "__main__":
    main()
