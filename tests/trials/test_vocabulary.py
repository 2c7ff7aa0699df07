"""Loss over a split vocabulary, or in chunks of the positions: the same numbers, without all the logits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trials.simulated import simulated_peaks
from tests.trials.test_own_parity import decoder
from trials.dryrun.tracker import fake_process_group
from trials.models.built_in import projected_loss
from trials.parallel import tensor
from trials.parallel.mesh import build_mesh
from trials.parallel.tensor import chunked_loss, loss_kernels
from trials.spec import Candidate, Kernels, Layout, LlamaModel, Precision, TextData, TrialSpec, Workload
from trials.training.loop import parallelize

VOCABULARY, POSITIONS = 32768, 4096
MODEL = LlamaModel(hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=4, ffn_hidden_size=64, vocab_size=VOCABULARY)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=POSITIONS, global_batch_size=1)
ALL_LOGITS = 4 * VOCABULARY * POSITIONS
"""Bytes of the logits of the whole vocabulary in fp32."""
OTHER_BYTES = 24 << 20
"""More than weights, states and activations of a rank of four."""


def trial(layout, *, loss_chunks=1, level="O0"):
    precision = Precision() if level == "O0" else Precision(level=level, dtype="bfloat16")
    candidate = Candidate(layout=layout, precision=precision, kernels=Kernels(loss_chunks=loss_chunks))
    return TrialSpec(workload=WORKLOAD, candidate=candidate)


def gradients(loss, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(300, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(300, (2, 5), generator=generator)
    made = loss(x, weight, targets)
    (1024 * made).backward()
    assert x.grad is not None and weight.grad is not None and made.dtype == torch.float32
    return made.detach(), x.grad / 1024, weight.grad / 1024


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("num_chunks", [2, 3, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_give_the_loss_and_gradients_of_the_whole(num_chunks, dtype, backend, monkeypatch):
    monkeypatch.setattr(tensor, "PIECE_ELEMENTS", 500)
    torch._dynamo.reset()
    by = loss_kernels(backend)
    chunked = gradients(functools.partial(chunked_loss, num_chunks=num_chunks, group=None, by=by), dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for value, wanted in zip(chunked, gradients(projected_loss, dtype), strict=True):
        assert float((value - wanted).abs().max() / wanted.abs().max()) < tolerance


def compiled_graphs(spec):
    """Code of all graphs, forward and backward, that one pass of the first rank compiles."""
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph.print_readable(print_output=False))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    layout, cpu = spec.candidate.layout, torch.device("cpu")
    with fake_process_group(0, layout.world_size), registered_backend(keep):
        (part,) = parallelize(spec, build_mesh(layout, cpu), cpu, stage=0)
        tokens = torch.zeros(1, spec.workload.seq_length, dtype=torch.long)
        part.module(tokens, **part.with_targets(tokens)).backward()
    return graphs


@contextlib.contextmanager
def registered_backend(keep):
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch._dynamo.register_backend(backend, name="kept")
    try:
        yield
    finally:
        torch._dynamo.backends.registry._COMPILER_FNS.pop("kept")
        loss_kernels.cache_clear()


@pytest.mark.representative("1-whole", "8-local")
@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tp=2, tp_engine="local"), Layout(tp=2, tp_engine="dtensor")],
    ids=["whole", "local", "dtensor"],
)
@pytest.mark.parametrize("loss_chunks", [1, 8])
@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it does itself while tracing
def test_head_and_loss_are_compiled_with_the_blocks(layout, loss_chunks):
    """The exponentials of the loss are inside of graphs, those of the forward and of the backward pass."""
    spec = trial(layout, loss_chunks=loss_chunks, level="O2")
    kernels = Kernels(loss_chunks=loss_chunks, compile="block", backend="kept")
    workload = dataclasses.replace(WORKLOAD, seq_length=64)
    candidate = dataclasses.replace(spec.candidate, kernels=kernels)
    graphs = compiled_graphs(dataclasses.replace(spec, workload=workload, candidate=candidate))
    of_loss = [graph for graph in graphs if re.search(r"aten\.(exp\.|logsumexp|_log_softmax)", graph)]
    assert len(of_loss) == 2, graphs


def test_many_chunks_round_the_gradient_of_the_head_as_little_as_the_whole():
    """Each adds to what is summed up in fp32: in bfloat16 the error would grow with their number."""
    exact = head_gradient(projected_loss, torch.float64)
    whole, chunked = (
        float((head_gradient(loss, torch.bfloat16) - exact).norm() / exact.norm())
        for loss in (projected_loss, functools.partial(chunked_loss, num_chunks=64, group=None))
    )
    assert chunked < 1.5 * whole < 1e-2, (chunked, whole)


def head_gradient(loss, dtype):
    """Gradient of a head's weights after 512 positions; drawn so that bfloat16 holds all of the inputs."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 128, 32, generator=generator).bfloat16().to(dtype)
    weight = torch.randn(500, 32, generator=generator).mul_(0.02).bfloat16().to(dtype).requires_grad_()
    loss(x, weight, torch.randint(500, (4, 128), generator=generator)).backward()
    assert weight.grad is not None
    return weight.grad.double()


@pytest.mark.representative("O2-local")
@pytest.mark.parametrize(
    "size",
    [{"tp_engine": "local"}, {"tp_engine": "dtensor"}, {"tp_engine": "local", "sequence_parallel": True}],
    ids=["local", "dtensor", "local-sp"],
)
@pytest.mark.parametrize(("level", "shrinks"), [("O0", 1), ("O2", 2)], ids=["O0", "O2"])
def test_no_rank_holds_logits_of_the_whole_vocabulary(level, shrinks, size):
    """A rank holds its part of them once, in their own type, a piece of that in fp32, and little else."""
    (peak,) = simulated_peaks([trial(Layout(tp=4, **size), level=level)])
    part = ALL_LOGITS / 4 / shrinks
    assert peak < part + 4 * tensor.PIECE_ELEMENTS + OTHER_BYTES < ALL_LOGITS / 2


class Shapes(TorchDispatchMode):
    """Elements of the largest tensors that operators made."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        leaves = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.num_elements = max([self.num_elements, *leaves])
        return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "keys", "num_chunks", "share"),
    [
        ("llama", {}, 1, 2),
        ("gpt_neox", {}, 2, 4),
        ("qwen3", {"tie_word_embeddings": True}, 4, 4),
        ("qwen3", {"tie_word_embeddings": True}, 1, 1),
    ],
)
def test_decoders_of_transformers_never_make_all_logits(model_type, keys, num_chunks, share):
    """Under tp 2, forward and backward; a head tied to the embedding stays whole, but takes chunks."""
    positions, vocabulary_size = 256, 2048
    model = decoder(model_type, vocab_size=vocabulary_size, max_position_embeddings=positions, **keys)
    workload = Workload(model=model, data=TextData(), seq_length=positions, global_batch_size=1)
    layout = Layout(tp=2)
    spec = TrialSpec(workload=workload, candidate=Candidate(layout=layout, kernels=Kernels(loss_chunks=num_chunks)))
    cpu = torch.device("cpu")
    with fake_process_group(0, 2):
        (part,) = parallelize(spec, build_mesh(layout, cpu), cpu, stage=0)
        tokens = torch.zeros(1, positions, dtype=torch.long)
        with Shapes() as shapes:
            part.module(tokens, **part.with_targets(tokens)).backward()
    assert shapes.num_elements == positions * vocabulary_size // share


def test_chunks_hold_one_chunk_of_the_logits():
    """And a copy of it while its exponentials are summed up."""
    whole, chunked = (trial(Layout(), loss_chunks=chunks) for chunks in (1, 8))
    split = dataclasses.replace(chunked, candidate=dataclasses.replace(chunked.candidate, layout=Layout(tp=4)))
    peaks = simulated_peaks([whole, chunked, split])
    states = 4 * 4 * 2 * VOCABULARY * MODEL.hidden_size
    assert peaks[0] > 2 * ALL_LOGITS
    assert peaks[1] < states + ALL_LOGITS / 4 + OTHER_BYTES / 2
    assert peaks[2] < states / 4 + ALL_LOGITS / 16 + OTHER_BYTES / 2
