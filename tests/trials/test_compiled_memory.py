"""What a compiled block keeps for its backward pass: less than an eager one, as much as the partitioned graph shows."""

import contextlib

import pytest
import torch

from orchestrator.planning.dry_runs import COMPILED_SAVING
from trials.models.built_in import Block, rotary_table
from trials.spec import LlamaModel

POSITIONS = 512
SHAPES = {
    "llama3-8b": LlamaModel(hidden_size=512, num_layers=1, num_heads=8, num_kv_heads=2, ffn_hidden_size=1792),
    "llama2-13b": LlamaModel(hidden_size=640, num_layers=1, num_heads=5, num_kv_heads=5, ffn_hidden_size=1728),
}
"""An eighth of their width."""
LEVELS = ("O0", "O1", "O2")


def kept_bytes(shape, level, backend):
    """Bytes that autograd keeps in the forward pass of a block, without its weights."""
    torch._dynamo.reset()
    dtype = torch.bfloat16 if level == "O2" else torch.float32
    block = Block(shape, 0).to(dtype)
    if backend is not None:
        block.compile(backend=backend, dynamic=False, fullgraph=True)
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    cast = torch.autocast("cpu", torch.bfloat16) if level == "O1" else contextlib.nullcontext()
    x = torch.zeros(2, POSITIONS, shape.hidden_size, dtype=dtype, requires_grad=True)
    with cast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, rotary_table(POSITIONS, shape.hidden_size // shape.num_heads, 1e4))
    return sum(size for size, _ in kept.values())


@pytest.mark.representative("O2-llama3-8b")
@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it does itself while tracing
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_block_keeps_less_but_not_less_than_the_rule_assumes(shape, level):
    eager, compiled = (kept_bytes(SHAPES[shape], level, by) for by in (None, "aot_eager_decomp_partition"))
    assert 1 - COMPILED_SAVING < compiled / eager < 0.9


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_inductor_keeps_what_the_partitioned_graph_keeps(level):
    shape = SHAPES["llama3-8b"]
    partitioned, inductor = (kept_bytes(shape, level, by) for by in ("aot_eager_decomp_partition", "inductor"))
    assert partitioned == pytest.approx(inductor, rel=0.03)
