"""Activations and optimiser states in host memory: they come back as they were, in the right order of queues."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import pytest
import torch
from torch import nn

from benchmarks.dryrun.gang import measured_peaks
from tests.support.streams import StreamRaceError, StreamWatch, WatchedEvent
from tests.trials.gang import differences, run_gang
from tests.trials.ranks import run_ranks
from tests.trials.simulated import FAMILIES, simulated_runs
from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials import offload
from trials import offload as host
from trials.dryrun.estimate import HOST_FRAGMENTATION, DryRunRequest
from trials.failure import InfeasibleSpec
from trials.legality import check, violations
from trials.models.built_in import next_token_loss
from trials.offload import CopyStream, HostMemory
from trials.parallel.mesh import HeldParameter, build_mesh
from trials.spec import (
    Experts,
    ImageFolderData,
    Kernels,
    Layout,
    LossScale,
    Offload,
    Precision,
    Recompute,
    ResNetModel,
    SelectiveRecompute,
)
from trials.training import optimizer as adamw
from trials.training.loop import parallelize
from trials.training.optimizer import HostAdamW, LocalAdamW

CPU = torch.device("cpu")
ON = Offload(activations=True)
DEEP = dataclasses.replace(WORKLOAD, model=dataclasses.replace(SHAPE, num_layers=5))
O1 = Precision(level="O1", dtype="bfloat16")


def trained(offload, **knobs):
    (part,) = parallelize(tiny_spec(workload=DEEP, offload=offload, **knobs), None, CPU, stage=0)
    tokens = torch.arange(64).view(4, 16)
    loss = next_token_loss(part.module(tokens), tokens)
    loss.backward()
    return part, loss.detach()


def test_all_layers_but_the_last_offload_activations_and_train_the_same():
    moved, loss = trained(ON)
    kept, expected = trained(Offload())
    assert loss == expected
    for one, other in zip(moved.model.parameters(), kept.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    assert kept.offload_meter.num_bytes == 0
    per_layer, rest = divmod(moved.offload_meter.num_bytes, 4)
    # Among them are at least: input, both norms' outputs, q, k, v, what attention gives, gate, up, and what they make.
    tokens, hidden, ffn = 64, 32, 70
    assert rest == 0 and per_layer >= tokens * 4 * (5 * hidden + 2 * 16 + 3 * ffn)


SHORT = dataclasses.replace(
    DEEP, model=dataclasses.replace(DEEP.model, hidden_size=64, ffn_hidden_size=64), seq_length=2
)
"""All activations of one sequence are smaller than what is worth moving."""


BLOCK = Kernels(compile="block", backend="aot_eager")


def moved_bytes(cases):
    """What a rank moves in one pass over one short sequence, by case."""
    warnings.simplefilter("ignore")  # what Dynamo looks at warns
    found = []
    for layout, knobs in cases:
        mesh = build_mesh(layout, CPU) if layout.world_size > 1 else None
        spec = tiny_spec(layout, **{"workload": SHORT, "offload": ON, "precision": O1} | knobs)
        assert not list(violations(spec.workload, spec.candidate))
        (part,) = parallelize(spec, mesh, CPU, stage=0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=spec.candidate.precision is O1):
            part.module(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
        found.append(part.offload_meter.num_bytes)
    return found


@pytest.mark.parametrize("kernels", [Kernels(), BLOCK], ids=["eager", "block"])
def test_weights_stay_where_they_are(kernels):
    """Also autocast's copies of them: without activations worth moving, nothing moves."""
    assert moved_bytes([(Layout(), {"kernels": kernels})]) == [0]


@pytest.mark.exhaustive
def test_split_weights_stay_where_they_are(tmp_path):
    """Also the copies of them that projections of the local engine make in 16 bits."""
    layouts = [Layout(tp=2, **options) for options in ({}, {"tp_engine": "local"})]
    layouts.append(dataclasses.replace(layouts[1], sequence_parallel=True))
    cases = [*((layout, {}) for layout in layouts), (layouts[1], {"kernels": BLOCK})]
    assert run_ranks(moved_bytes, 2, tmp_path, cases) == [[0] * 4] * 2


@pytest.mark.parametrize("kernels", [Kernels(), BLOCK], ids=["eager", "block"])
def test_gathered_weights_stay_where_they_are(kernels, tmp_path):
    """FSDP's, which are whole in a call only: in a layer's, or in that of a unit inside."""
    zero3, shape = Layout(dp_shard=2, zero_stage=3), Experts(num_experts=4, top_k=1, ffn_hidden_size=16)
    mixture = dataclasses.replace(SHORT, model=dataclasses.replace(SHORT.model, experts=shape))
    cases = [(zero3, {"kernels": kernels})]
    if kernels.compile == "off":
        cases += [(dataclasses.replace(zero3, ep=2), {"workload": mixture})]
        cases += [(zero3, {"precision": dataclasses.replace(O2, keep_fp32=(r".*\.w2",))})]
    assert run_ranks(moved_bytes, 2, tmp_path, cases) == [[0] * len(cases)] * 2


def bytes_per_sequence(cases):
    """How much more each rank moves for a batch with one more sequence, by case; the first batch has just as many
    tokens as weights have rows and columns."""
    warnings.simplefilter("ignore")
    workload = dataclasses.replace(
        DEEP, model=dataclasses.replace(DEEP.model, hidden_size=128, ffn_hidden_size=128), seq_length=4
    )
    found = []
    for layout, kernels, precision in cases:
        mesh = build_mesh(layout, CPU) if layout.world_size > 1 else None
        moved = []
        for batch in (32, 33, 34):
            torch._dynamo.reset()
            spec = tiny_spec(layout, workload=workload, offload=ON, precision=precision, kernels=kernels)
            (part,) = parallelize(spec, mesh, CPU, stage=0)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is O1):
                part.module(torch.arange(batch * 4).view(batch, 4)).sum().backward()
            moved.append(part.offload_meter.num_bytes)
        found.append([more - less for less, more in itertools.pairwise(moved)])
    return found


@pytest.mark.parametrize("precision", [O1, Precision()], ids=["O1", "fp32"])
@pytest.mark.parametrize("kernels", [Kernels(), BLOCK], ids=["eager", "block"])
def test_activations_of_a_weights_shape_move(kernels, precision):
    (per_sequence,) = bytes_per_sequence([(Layout(), kernels, precision)])
    assert per_sequence[0] == per_sequence[1] > 0


@pytest.mark.representative("block")
@pytest.mark.parametrize(
    ("engine", "kernels", "precision"),
    [("dtensor", Kernels(), O1), ("local", Kernels(), O1), ("local", Kernels(), Precision()), ("local", BLOCK, O1)],
    ids=["dtensor", "local", "fp32", "block"],
)
def test_activations_of_a_split_weights_shape_move(engine, kernels, precision, tmp_path):
    for ((one, other),) in run_ranks(
        bytes_per_sequence, 2, tmp_path, [(Layout(tp=2, tp_engine=engine), kernels, precision)]
    ):
        assert one == other > 0


def test_weights_of_convolutions_stay_where_they_are():
    """Of two small images a ResNet keeps much less than its weights."""
    workload = dataclasses.replace(WORKLOAD, model=ResNetModel(image_size=64), data=ImageFolderData())
    (part,) = parallelize(tiny_spec(workload=workload, offload=ON, precision=O1), None, CPU, stage=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        part.module(torch.zeros(2, 3, 64, 64)).sum().backward()
    assert 0 < part.offload_meter.num_bytes < sum(one.numel() for one in part.model.parameters())


def test_full_recompute_moves_the_layers_inputs():
    part, loss = trained(ON, recompute=Recompute(full=((5,),)))
    _, expected = trained(Offload())
    assert loss == expected
    assert part.offload_meter.num_bytes == 4 * (64 * 32 * 4)


@pytest.mark.exhaustive
def test_the_device_holds_two_layers_at_a_time():
    """What leaves the device is what the host gets; a real rank on a CPU, where both are one, needs the sum."""
    base = FAMILIES["single, fp32"]
    spec = dataclasses.replace(base, candidate=dataclasses.replace(base.candidate, offload=ON))
    kept, moved = (simulated(one) for one in (base, spec))
    assert kept.host_bytes == 0
    assert moved.peak_bytes == pytest.approx(kept.peak_bytes - moved.host_bytes, rel=0.01)
    assert moved.host_bytes > 0.12 * kept.peak_bytes
    assert measured_peaks(spec)[0] == pytest.approx(moved.peak_bytes + moved.host_bytes, rel=0.01)


def simulated(spec):
    return simulated_runs([DryRunRequest(spec=spec, rank=0, mode="cpu")])[0]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"kernels": Kernels(compile="model")}, "compile model makes a single graph; use block"),
        ({"kernels": Kernels(compile="block", compile_mode="reduce-overhead")}, "in its own memory pool"),
        (
            {"recompute": Recompute(selective=(SelectiveRecompute(pattern=".*norm.*", num_layers=((1,),)),))},
            "requires full recompute, not recompute of selected operators",
        ),
    ],
)
def test_refuses(knobs, words):
    with pytest.raises(InfeasibleSpec, match=words):
        check(tiny_spec(workload=DEEP, offload=ON, **knobs))
    check(tiny_spec(workload=DEEP, **knobs))


STATES_ON = Offload(optimizer=True)
O2 = Precision(level="O2", dtype="bfloat16")
O2_FP16 = Precision(level="O2", dtype="float16", loss_scale=LossScale())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_match_the_device_even_for_tensors_split_into_groups(dtype, monkeypatch):
    monkeypatch.setattr("trials.training.optimizer.WORKSPACE_BYTES", 4 * 100)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(30, 7, generator=generator, dtype=dtype), torch.randn(8, generator=generator, dtype=dtype)]
    trained = []
    for make in (lambda held: LocalAdamW(held, lr=1e-2), lambda held: HostAdamW(held, CPU, lr=1e-2)):
        parameters = [torch.nn.Parameter(one.clone()) for one in weights]
        optimizer = make([HeldParameter(parameter) for parameter in parameters])
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, step - 1.0).mul_(parameter.detach())
            optimizer.step()
        trained.append(parameters)
    assert [state.master.numel() for state in optimizer.states] == [100, 100, 10, 8][: len(optimizer.states)]
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)


def test_states_and_update_buffers_are_allocated_in_host_memory(monkeypatch):
    """Devices apart, as a CPU has only one: every allocation beyond the model's own is a request for host memory."""
    requested = []
    monkeypatch.setattr(host, "allocating", lambda: requested.append(1) or torch.no_grad())
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = HostAdamW([HeldParameter(parameter)], CPU, lr=1e-2)
    parameter.grad = torch.ones(4)
    optimizer.step()
    (state,) = optimizer.states
    assert state.is_copy and state.master.data_ptr() != parameter.data_ptr() and requested


def test_step_counts_are_in_host_memory_unless_kernels_read_them(monkeypatch):
    """Without a fused kernel they are read on the host, which would wait for the device once per tensor and step."""
    for is_fused, where in ((True, "meta"), (False, "cpu")):
        monkeypatch.setattr(adamw, "has_fused_adamw", lambda _device, fused=is_fused: fused)
        assert adamw.UpdateState(torch.empty(3, device="meta")).num_steps.device.type == where


def test_steps_after_the_first_need_no_new_memory(monkeypatch):
    """Pages that are new to a process cost more than what is computed in them."""
    monkeypatch.setattr("trials.training.optimizer.WORKSPACE_BYTES", 4 * 100)
    parameter = torch.nn.Parameter(torch.ones(30, 7, dtype=torch.bfloat16))
    optimizer = HostAdamW([HeldParameter(parameter)], CPU, lr=1e-2)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made = []
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _as_dict(getattr(torch, name), made))
    optimizer.step()
    assert made and {tensor.device.type for tensor in made} == {"meta"}


def _as_dict(make, made):
    def run(*args, **options):
        made.append(make(*args, **options))
        return made[-1]

    return run


@pytest.mark.representative("ZeRO-1 x2-precision2-6-6")
@pytest.mark.parametrize(
    ("name", "precision", "device_bytes", "host_bytes"),
    [("single, fp32", Precision(), 8, 12), ("single, O2 bf16", O2, 12, 12), ("ZeRO-1 x2", O2, 6, 6)],
)
def test_the_device_holds_no_states(name, precision, device_bytes, host_bytes):
    """Per parameter: AdamW's two states and, with 16-bit weights, fp32 ones; on the host always fp32 ones."""
    base = FAMILIES[name]
    kept, moved = (
        simulated(dataclasses.replace(base, candidate=dataclasses.replace(base.candidate, **knobs)))
        for knobs in ({"precision": precision}, {"precision": precision, "offload": STATES_ON})
    )
    place = "forward/1/0.0 last-0"
    fallen = kept.peaks[place].total_bytes - moved.peaks[place].total_bytes
    assert fallen == pytest.approx(device_bytes * kept.num_parameters, rel=0.02)
    # In addition to the states there are two groups of gradients on the way, and new weights in 16 bits.
    least = host_bytes * kept.num_parameters
    assert least <= moved.host_bytes <= least + 10 * kept.num_parameters


def test_device_and_host_memory_match_a_real_rank():
    """On a CPU, the rank's memory is the sum of both."""
    base = FAMILIES["single, O2 bf16"]
    offload = Offload(optimizer=True, activations=True)
    spec = dataclasses.replace(base, candidate=dataclasses.replace(base.candidate, offload=offload))
    run = simulated(spec)
    assert measured_peaks(spec)[0] == pytest.approx(run.peak_bytes + run.host_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parity
def test_layouts_train_bit_for_bit_the_same(tmp_path):
    specs = []
    for layout, precision in (
        (Layout(dp_replicate=2), Precision()),
        (Layout(dp_shard=2, zero_stage=1), O2_FP16),
        (Layout(dp_shard=2, zero_stage=3), O2),
        (Layout(tp=2), O2),
    ):
        specs += [tiny_spec(layout, precision=precision, offload=STATES_ON), tiny_spec(layout, precision=precision)]
    results = run_gang(specs, tmp_path)
    for moved, kept in zip(results[::2], results[1::2], strict=True):
        assert differences(moved, kept) == (0.0, 0.0)


@pytest.fixture
def watch(monkeypatch):
    """A device with queues, and memory of its own for copies on the host, of which regions serve again."""
    made = StreamWatch().installed(monkeypatch, offload)
    monkeypatch.setattr(offload, "allocating", made.on_host)
    memory = HostMemory(CPU)
    memory._locks_pages = True

    def cut(size):
        with offload.allocating():
            return torch.empty(size, dtype=torch.uint8)  # races are distinguished by storage

    monkeypatch.setattr(memory, "_cut", cut)
    for module in ("trials.offload", "trials.training.optimizer"):
        monkeypatch.setattr(f"{module}.host_memory_for", lambda _device: memory)
    return made


class Layers:
    """Five layers whose activations move, two micro-batches at a time as in a pipeline."""

    def __init__(self, precision):
        spec = tiny_spec(workload=DEEP, offload=ON, precision=precision)
        (self.part,) = parallelize(spec, None, CPU, stage=0)
        self._autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision.level == "O1")

    def run(self, watch):
        tokens = torch.arange(64).view(4, 16)
        with watch:
            waiting = []
            for number in range(4):
                with self._autocast:
                    waiting.append(next_token_loss(self.part.module(tokens), tokens))
                if number:
                    waiting.pop(0).backward()
            waiting.pop().backward()


@pytest.mark.parametrize("precision", [Precision(), O1], ids=["O0", "O1"])
def test_activations_are_accessed_by_one_queue_at_a_time(watch, precision):
    layers = Layers(precision)
    layers.run(watch)
    _, out, back = watch.streams
    assert len(out.launches) == len(back.launches) > 4 * 4 * 10


def _none(*_):
    pass


def without(way, name):
    """Leave out one kind of wait of one way's queue."""

    def patch(monkeypatch, ways):
        monkeypatch.setattr(getattr(ways, way), name, _none)

    return patch


LAYER_WAITS = {
    "activations are made": without("out", "follow"),
    "the device may write where they were": without("out", "wait_for"),
    "the device may write where they come": without("back", "follow"),
    "they are back": without("back", "wait_for"),
}


@pytest.mark.parametrize("wait", LAYER_WAITS)
def test_a_missing_wait_for_activations_is_detected(watch, monkeypatch, wait):
    layers = Layers(Precision())
    call = next(iter(layers.part.model.layers.values()))._compiled_call_impl
    LAYER_WAITS[wait](monkeypatch, next(one for one in call.args if hasattr(one, "out")))
    with pytest.raises(StreamRaceError):
        layers.run(watch)


def test_host_memory_is_reused_once_no_stream_uses_it(watch, monkeypatch):
    here = torch.ones(4)

    def use_twice():
        memory = offload.HostMemory(CPU)
        memory._locks_pages = True
        monkeypatch.setattr(memory, "_cut", lambda size: torch.empty(size, dtype=torch.uint8))
        for stream in (CopyStream(CPU), CopyStream(CPU)):
            region = memory.take(here.nbytes)
            stream.follow()
            stream.follow_mark(region.busy_until)
            stream.copy(region.like(here), here)
            memory.give_back(region, stream.mark())

    with watch, watch.on_host():
        use_twice()
    monkeypatch.setattr(CopyStream, "follow_mark", _none)
    with pytest.raises(StreamRaceError, match="copy_"), watch, watch.on_host():
        use_twice()


class Update:
    """Five groups of one parameter each, in steps whose gradients the device makes from the weights."""

    def __init__(self, monkeypatch, dtype):
        monkeypatch.setattr("trials.training.optimizer.WORKSPACE_BYTES", 4 * 100)
        self.parameters = [nn.Parameter(torch.ones(10, 10, dtype=dtype)) for _ in range(5)]
        self.optimizer = HostAdamW([HeldParameter(one) for one in self.parameters], CPU)

    def run(self, watch):
        with watch:
            for _ in range(3):
                for one in self.parameters:
                    one.grad = one.detach().t() * 2  # laid out otherwise: cut from a separate copy
                self.optimizer.step()
                self.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_accessed_by_one_queue_at_a_time(watch, monkeypatch, dtype):
    update = Update(monkeypatch, dtype)
    update.run(watch)
    _, out, back = watch.streams
    assert out.launches.count("copy_.default") == back.launches.count("copy_.default") == 15


def test_gradients_go_out_while_weights_come_back(watch, monkeypatch):
    """In a step of five groups what goes out has waited for one that came back: the host needed its buffer again."""
    update = Update(monkeypatch, torch.bfloat16)
    update.run(watch)
    _, out, back = watch.streams
    assert len(back.launches) == 3 * 5
    assert out.clock[back.name] == 2 * 5 + 1


UPDATE_WAITS = {
    "gradients are made": lambda patch, one: patch.setattr(one._out, "follow", _none),
    "gradients are out": lambda patch, _: patch.setattr(WatchedEvent, "synchronize", _none),
    "weights are back": lambda patch, one: patch.setattr(one._back, "wait_for", _none),
    "weights have left the buffer": lambda patch, _: patch.setattr(
        "trials.training.optimizer._Buffers.begin_weights", _restart_only
    ),
}


def _restart_only(buffers):
    buffers._used["weights"] = 0


@pytest.mark.parametrize("wait", UPDATE_WAITS)
def test_a_missing_wait_for_the_update_is_detected(watch, monkeypatch, wait):
    update = Update(monkeypatch, torch.bfloat16)
    UPDATE_WAITS[wait](monkeypatch, update.optimizer)
    with pytest.raises(StreamRaceError):
        update.run(watch)


def test_page_locked_memory_is_little_more_than_what_is_in_use(monkeypatch):
    """What layers of Llama-2-7B keep of 4096 tokens, in kilobytes for megabytes: torch alone would round each piece up
    to a power of two, here 28% more."""
    monkeypatch.setattr(offload, "locked_slab", lambda size: torch.empty(size, dtype=torch.uint8))
    memory = HostMemory(CPU)
    memory._locks_pages = True
    sizes = [one << 10 for one in (32, 32, 32, 32, 32, 32, 86, 86, 86)]
    for _ in range(3):
        regions = [memory.take(size) for _ in range(32) for size in sizes]
        for region in reversed(regions):
            memory.give_back(region, None)
    in_use = 32 * sum(sizes)
    rounded = 32 * sum(1 << (size - 1).bit_length() for size in sizes)
    assert in_use <= memory.num_bytes < (1 + HOST_FRAGMENTATION) * in_use < rounded
