"""Pretrains a small Mixtral with DDP; the experts of every layer are split over groups of --expert-parallel ranks."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2, help="sequences per forward pass of a rank")
parser.add_argument("--grad-accum", type=int, default=4)
parser.add_argument("--expert-parallel", "--ep", type=int, default=1, help="ranks that share the experts of a layer")
parser.add_argument("--num-experts", type=int, default=4)
parser.add_argument("--seq-len", type=int, default=64)
parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
parser.add_argument("--steps", type=int, default=50)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if world % args.expert_parallel or args.num_experts % args.expert_parallel:
    raise SystemExit(
        f"--expert-parallel {args.expert_parallel} must divide {world} ranks and {args.num_experts} experts"
    )


class SplitExperts(nn.Module):
    """A rank's share of a layer's experts: tokens travel to the rank that holds their expert, and back."""

    def __init__(self, whole, group):
        super().__init__()
        self.whole, self.group, self.size = whole, group, dist.get_world_size(group)
        mine = whole.num_experts // self.size
        first = dist.get_rank(group) * mine
        for name in ("gate_up_proj", "down_proj"):
            setattr(whole, name, nn.Parameter(getattr(whole, name).detach()[first : first + mine].clone()))
        self.num_experts, whole.num_experts = mine * self.size, mine

    def forward(self, hidden, index, weights):
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        sends = counts.view(self.size, -1).sum(1).tolist()
        takes = received.view(self.size, -1).sum(1).tolist()
        rows = hidden[order // index.shape[1]]
        rows = all_to_all_single(rows.new_empty(sum(takes), rows.shape[1]), rows, takes, sends, group=self.group)
        local = torch.arange(self.whole.num_experts).repeat(self.size).repeat_interleave(received)
        rows = self.whole(rows, local[:, None], torch.ones_like(local[:, None], dtype=rows.dtype))
        rows = all_to_all_single(
            rows.new_empty(sum(sends), rows.shape[1]), rows.contiguous(), sends, takes, group=self.group
        )
        back = torch.zeros_like(rows).index_copy(0, order, rows) * weights.flatten()[:, None].to(rows.dtype)
        return back.view(*index.shape, -1).sum(1)


def split_experts(model, degree):
    """Splits the experts over groups of neighbouring ranks; returns them and the group of ranks that hold the same."""
    groups = [dist.new_group(list(range(first, first + degree))) for first in range(0, world, degree)]
    peers = [dist.new_group(list(range(first, world, degree))) for first in range(degree)]
    for layer in model.model.layers:
        layer.mlp.experts = SplitExperts(layer.mlp.experts, groups[rank // degree])
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return [model.get_parameter(name) for name in names], peers[rank % degree]


torch.manual_seed(0)
model = MixtralForCausalLM(
    MixtralConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=args.num_experts,
        num_experts_per_tok=2,
        max_position_embeddings=args.seq_len,
    )
)
experts, same = split_experts(model, args.expert_parallel) if args.expert_parallel > 1 else ([], None)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(1)
start = time.perf_counter()
for step in range(1, args.steps + 1):
    tokens = torch.randint(512, (world * args.batch_size * args.grad_accum, args.seq_len), generator=data)
    total = torch.zeros(())
    for batch in tokens[rank::world].split(args.batch_size):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = ddp(input_ids=batch, labels=batch).loss / args.grad_accum
        loss.backward()
        total += loss.detach()
    for parameter in experts:
        dist.all_reduce(parameter.grad, group=same)
        parameter.grad /= world
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    if rank == 0:
        now = time.perf_counter()
        print(f"step {step}: loss {total.item() / world:.5f}, {1e3 * (now - start):.2f} ms", flush=True)
        start = now
