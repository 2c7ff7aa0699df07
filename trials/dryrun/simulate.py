"""Simulation of a rank; records live memory at the start of every forward and backward pass, and the work after it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from trials.datasets import collated, open_user_data
from trials.dryrun import graphs
from trials.dryrun import tracker as fake
from trials.dryrun.estimate import CATEGORIES, DryRunRequest, PassKind, PassRun, RankRun, Traffic
from trials.dryrun.small import runs_of_chunk
from trials.dryrun.tracker import MemoryTracker, TrafficCounter, replaced
from trials.failure import InfeasibleSpec
from trials.kernels import compiled_units, expected_attention
from trials.legality import check
from trials.models import build_model, import_code, own_folder
from trials.models.model import DEVICE_TILE_WORDS
from trials.operators import in_backward
from trials.parallel.data_parallel import finish_gradients
from trials.parallel.mesh import build_mesh, stored_part
from trials.precision import autocast, parameter_dtype
from trials.sizes import all_chunks, coordinates, num_virtual_stages_total
from trials.spec import (
    HuggingFaceModel,
    Kernels,
    LinearModel,
    LlamaModel,
    PythonData,
    Recompute,
    ResNetModel,
    TrialSpec,
    UserModel,
)
from trials.training.loop import ModelPart, Pipeline, Stage, Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """The tracker's counts when a pass begins."""

    kind: PassKind
    chunk: int
    live: dict[str, int]
    host_bytes: int
    flops: Counter[str]
    tally: TrafficCounter


class PassLog:
    """The passes of a step so far."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._moments: list[_Moment] = []
        self._host_peaks: list[int] = []
        """Peaks of finished passes."""

    def watch(self, stages: list[Stage]) -> None:
        """Log the passes of a pipeline's stages."""
        for chunk, stage in enumerate(stages):
            for name, function in (
                ("forward_one_chunk", self._forward),
                ("backward_one_chunk", self._backward),
                ("backward_weight_one_chunk", self._weights),
            ):
                setattr(stage, name, function(chunk, getattr(stage, name)))

    def begin(self, kind: PassKind, chunk: int) -> None:
        """Record that a pass begins, which ends the previous one."""
        tracker = self._tracker
        if self._moments:
            self._host_peaks.append(tracker.peak_host_bytes)
        self._moments.append(
            _Moment(
                kind=kind,
                chunk=chunk,
                live={name: tracker.live_bytes[name] for name in CATEGORIES},
                host_bytes=tracker.host_bytes,
                flops=Counter(tracker.flops),
                tally=tracker.tally(),
            )
        )
        tracker.begin_pass()

    def count(self, kind: PassKind) -> int:
        """Return how many passes of this kind have begun."""
        return sum(moment.kind == kind for moment in self._moments)

    def runs(self) -> tuple[PassRun, ...]:
        """Return all passes after the end of the step."""
        ends = [(moment.flops, moment.tally) for moment in self._moments[1:]]
        ends.append((Counter(self._tracker.flops), self._tracker.tally()))
        peaks = [*self._host_peaks, self._tracker.peak_host_bytes]
        return tuple(
            PassRun(
                kind=moment.kind,
                chunk=moment.chunk,
                live=moment.live,
                host_bytes=moment.host_bytes,
                peak_host_bytes=peak,
                flops=flops - moment.flops,
                collectives=_traffic(tally - moment.tally),
            )
            for moment, (flops, tally), peak in zip(self._moments, ends, peaks, strict=False)
        )

    def _forward(self, chunk: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.begin("forward", chunk)
            return function(*args, **options)

        return run

    def _backward(self, chunk: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(number: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> Any:
            self.begin("backward" if full_backward else "input", chunk)
            return function(number, loss, full_backward, last_backward)

        return run

    def _weights(self, chunk: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.begin("weights", chunk)
            return function(*args, **options)

        return run


def _traffic(counter: TrafficCounter) -> dict[str, Traffic]:
    names = sorted({name for name, _ in counter})
    return {name: Traffic(num_calls=counter[name, "calls"], num_bytes=counter[name, "bytes"]) for name in names}


# Pipeline schedules with one rank alone: shapes at stage boundaries are set, not requested from the neighbours.


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.pipelining import _utils, schedules
    from torch.distributed.pipelining.schedules import _PipelineSchedule

_VOTES = hasattr(_PipelineSchedule, "_warmup_p2p")
"""Whether stages vote on known shapes before the first step, as since torch 2.12."""


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Skip the vote of all stages on whether shapes are known, which reads numbers from the neighbours.

    torch before 2.12 has no vote: it sends a number to each neighbour, and requests unknown shapes.
    """
    if not _VOTES:
        with replaced(Stage, "_get_init_p2p_neighbors_ops", lambda _: []):
            yield
        return

    def agree(_schedule: Any, stages: list[Stage], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC

    with replaced(_PipelineSchedule, "_warmup_p2p", agree):
        yield


class _HeldWorks:
    """Works that hold what they send until they are waited for, like those of real groups."""

    def __init__(self, works: list[Any], tensors: list[torch.Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._tensors.clear()


@contextlib.contextmanager
def held_sends() -> Iterator[None]:
    """Hold sent tensors until the end of the step, when schedules of several chunks wait for their sends."""
    original = schedules._batch_p2p

    def batch_p2p(operations: list[Any], desc: str | None = None) -> list[_HeldWorks]:
        works = original(operations, desc)
        return [_HeldWorks(works, [operation.tensor for operation in operations])] if works else []

    with replaced(schedules, "_batch_p2p", batch_p2p):
        yield


def record_shapes(stages: list[Stage], parts: list[ModelPart], spec: TrialSpec) -> None:
    """Set the shapes and types at each stage's boundaries."""
    borders = borders_of(spec)
    for stage, part in zip(stages, parts, strict=True):
        first, last = part.chunk.is_first, part.chunk.is_last
        number = part.chunk.virtual_stage
        received, sent = borders[number], borders[number + 1]
        if not _VOTES:
            older: Any = stage
            older.inputs_meta = (received,)
            older._configure_outputs_meta((sent,))
            continue
        stage._user_meta = _utils._StageMeta(
            inputs=_metas(received),
            outputs=_metas(sent),
            input_grads=None if first else _metas(received.detach()),
            output_grads=None if last else _metas(sent.detach()),
        )


def borders_of(spec: TrialSpec) -> list[Tensor]:
    """Return one micro-batch's tensors as one rank exchanges them, on the meta device: the input of the model, those
    between its virtual stages, and the output.

    Raises:
        InfeasibleSpec: the model has no such pipeline.
    """
    if isinstance(spec.workload.model, UserModel):
        return _own_borders(spec)
    hidden = _meta(boundary_size(spec), _boundary_dtype(spec)).requires_grad_()
    between = [hidden] * (num_virtual_stages_total(spec.candidate.layout) - 1)
    return [_meta(_input_size(spec), torch.long), *between, _output(spec)]


def _own_borders(spec: TrialSpec) -> list[Tensor]:
    """Run a micro-batch through all stages of an imported module, on fake tensors and without splits: plans for tensor
    parallelism exchange whole tensors."""
    workload = spec.workload
    rows = spec.candidate.micro_batch_size
    precision = spec.candidate.precision
    parts = [build_model(workload, chunk) for chunk in all_chunks(spec.candidate.layout, workload.num_layers)]
    for part in parts:
        part.store_as(parameter_dtype(precision, sharded=False))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), autocast(spec.candidate, CPU):
        x, targets = (tensor[:rows] for tensor in _whole_batch(spec))
        found: list[Any] = [x]
        for part in parts:
            part.to_empty(device=CPU)
            part.materialize(CPU)
            x = part(x, **({"targets": targets} if part.computes_loss else {}))
            found.append(x)
    return [_meta(tuple(one.shape), one.dtype).requires_grad_(i > 0) for i, one in enumerate(found)]


def boundary_size(spec: TrialSpec) -> tuple[int, ...]:
    """Return the shape of one micro-batch's hidden states as sent by one rank.

    Raises:
        InfeasibleSpec: the model's stages exchange tensors of different shapes.
    """
    model, candidate = spec.workload.model, spec.candidate
    layout, rows = candidate.layout, candidate.micro_batch_size
    if isinstance(model, LlamaModel):
        split = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        return (rows, spec.workload.seq_length // split, model.hidden_size)
    if isinstance(model, LinearModel):
        return (rows, model.size)
    raise InfeasibleSpec(f"dry runs do not support pipelines of model kind {model.kind}")


def _boundary_dtype(spec: TrialSpec) -> torch.dtype:
    """Return the type: residual streams stay fp32 under autocast; O2 computes in 16 bits."""
    precision = spec.candidate.precision
    if precision.base == "O1" and isinstance(spec.workload.model, LinearModel):
        return getattr(torch, precision.dtype)  # type: ignore[no-any-return]
    return parameter_dtype(precision, sharded=False)


def _input_size(spec: TrialSpec) -> tuple[int, ...]:
    return (spec.candidate.micro_batch_size, spec.workload.seq_length // spec.candidate.layout.cp)


def _output(spec: TrialSpec) -> torch.Tensor:
    """Return the last stage's output; for a Llama, its loss."""
    if isinstance(spec.workload.model, LlamaModel):
        return _meta((), torch.float32).requires_grad_()
    return _meta(boundary_size(spec), getattr(torch, spec.candidate.precision.dtype)).requires_grad_()


def _meta(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _metas(tensor: torch.Tensor) -> Any:
    return _utils.extract_tensor_metas((tensor,))


# One rank of a trial through the real build, forward, backward and optimiser code, on fake tensors.


CUDA_GRANULE_BYTES = 512
"""Multiple to which CUDA's caching allocator rounds sizes up."""

CPU = torch.device("cpu")
"""Device of the fake tensors: fake CUDA tensors abort the process if torch was built without CUDA."""


class DryTrainer(Trainer):
    """The real trainer, except that it reads no values: gradients count as finite."""

    def _is_finite(self, totals: Tensor) -> bool:  # noqa: ARG002
        return True


def simulate(request: DryRunRequest) -> RankRun:
    """Simulate building the rank and two steps. The second step is reported, because it includes optimiser states and
    what the first one leaves.

    It patches torch while it runs, so call it in a separate process.

    Raises:
        InfeasibleSpec: a real run would reject the specification too.
    """
    started_s = time.process_time()
    check(request.spec)
    if graphs.is_simulated(request.spec):
        try:
            return _run(request, graphs.with_graphs(request.spec), started_s)
        except InfeasibleSpec:
            raise
        except Exception as error:  # of any part of the compiler
            logger.info("simulated as eager code: %s: %s", type(error).__name__, error)
    run = _run(request, graphs.without_graphs(request.spec), started_s)
    return dataclasses.replace(run, is_upper_bound=request.spec.candidate.kernels.compile != "off")


def _run(request: DryRunRequest, spec: TrialSpec, started_s: float) -> RankRun:
    with simulation(dataclasses.replace(request, spec=spec)) as built:
        return built.run(started_s)


@contextlib.contextmanager
def simulation(request: DryRunRequest) -> Iterator[SimulatedRank]:
    """Build the rank on fake tensors in a fake world; see :func:`simulate`."""
    spec = request.spec
    is_accelerator = request.mode == "accelerator"
    tracker = MemoryTracker(CUDA_GRANULE_BYTES if is_accelerator else 1)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(own_folder(spec.workload.model))
        import_code(spec.workload.model)
        if spec.candidate.kernels.compile != "off":
            stack.enter_context(graphs.simulated_graphs(tracker))
        stack.enter_context(fake.fake_process_group(request.rank, spec.candidate.layout.world_size))
        mesh = build_mesh(spec.candidate.layout, CPU)
        stack.enter_context(fake.storage_from(mode, DEVICE_TILE_WORDS if is_accelerator else None))
        stack.enter_context(fake.tracked_resizes(tracker))
        stack.enter_context(fake.untracked_propagation(tracker))
        stack.enter_context(fake.host_memory(tracker))
        stack.enter_context(fake.ddp_as_buckets(tracker, mode))
        if spec.candidate.layout.pp > 1:
            stack.enter_context(static_shapes())
            stack.enter_context(held_sends())
        stack.enter_context(expected_attention(spec))
        stack.enter_context(fake.unpacked_sequences())
        stack.enter_context(fake.expert_rows(crowded=request.crowded))
        if is_accelerator:
            stack.enter_context(fake.fused_rms_norm())
            stack.enter_context(fake.scaled_matmuls())
        yield SimulatedRank(request, spec, mesh, mode, tracker)


class SimulatedRank:
    """One rank after building. It may :meth:`run` once."""

    def __init__(
        self, request: DryRunRequest, spec: TrialSpec, mesh: Any, mode: FakeTensorMode, tracker: MemoryTracker
    ) -> None:
        self.request = request
        self.spec = spec
        self.mode = mode
        self.tracker = tracker
        self.log = PassLog(tracker)
        place = coordinates(spec.candidate.layout, request.rank)
        tracker.phase = "build"
        with tracker:
            self.trainer = DryTrainer(spec, mesh, CPU, place=place)
        self.build_peaks = tracker.peaks()
        """Peaks of the build, all at the place :data:`~trials.dryrun.estimate.BUILD`."""
        tracker.phase = "forward"
        self._is_pipeline = isinstance(self.trainer.engine, Pipeline)

    def run(self, started_s: float) -> RankRun:
        tracker, trainer = self.tracker, self.trainer
        self._prepare()
        with self.mode, tracker:
            inputs, targets = batch(self.spec, trainer)
            self._make_optimizer_states()
            tracker.assign([inputs, targets], "input")
            tracker.restart()
            if not self._is_pipeline:
                self.log.begin("forward", 0)
            trainer.step(inputs, targets, self)
        passes = self.log.runs()
        return RankRun(
            rank=self.request.rank,
            num_parameters=sum(stored_part(parameter).numel() for parameter in trainer.parameters),
            peaks=self.build_peaks | tracker.peaks(),
            host_bytes=max(one.peak_host_bytes for one in passes),
            flops=dict(tracker.flops),
            collectives=tracker.collectives(),
            passes=passes,
            cpu_s=time.process_time() - started_s,
        )

    def _prepare(self) -> None:
        tracker, trainer, candidate = self.tracker, self.trainer, self.spec.candidate
        for part in trainer.parts:
            tracker.assign(part.model.parameters(), "param")
            tracker.assign(part.model.buffers(), "param")
            track_layers(part, candidate.recompute, candidate.kernels, tracker)
        tracker.reclassify(("activation", "temporary"), "optimizer")
        if self._is_pipeline:
            assert isinstance(trainer.engine, Pipeline)
            self.log.watch(trainer.engine.stages)
            record_shapes(trainer.engine.stages, trainer.parts, self.spec)
        if trainer.optimizer is not None:
            trainer.optimizer.register_step_pre_hook(lambda *_: self._enter("optimizer"))
            trainer.optimizer.register_step_post_hook(lambda *_: self._enter("other"))

    def _enter(self, phase: Literal["other", "optimizer"]) -> None:
        self.tracker.phase, self.tracker.place = phase, ""

    def mark(self, phase: str) -> None:
        """Set the phase as the trainer's marker, which receives each phase as it ends."""
        if phase == "backward":
            self._enter("other")
            self.tracker.assign((parameter.grad for parameter in self.trainer.parameters), "grad")
        if not self._is_pipeline:
            self._begin_next(phase)

    def _begin_next(self, ended: str) -> None:
        """Start the next pass; without a pipeline, the end of a pass is the start of the next."""
        if ended == "forward":
            self.log.begin("backward", 0)
        elif ended == "backward":
            num_microbatches = self.spec.candidate.num_microbatches(self.spec.workload.global_batch_size)
            if self.log.count("forward") < num_microbatches:
                self.log.begin("forward", 0)

    def _make_optimizer_states(self) -> None:
        """Update once with fake gradients; the next step frees or replaces everything else that a first step leaves."""
        for parameter in self.trainer.parameters:
            parameter.grad = torch.empty_like(parameter)
        for part in self.trainer.parts:
            finish_gradients(part.module)
        self.tracker.assign(self.trainer.parameters, "param")
        self.tracker.assign((parameter.grad for parameter in self.trainer.parameters), "grad")
        if self.trainer.optimizer is not None:
            self.trainer.optimizer.step()
            self.trainer.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        self.tracker.reclassify(("activation", "temporary"), "optimizer")


def batch(spec: TrialSpec, trainer: Trainer) -> tuple[Tensor | None, Tensor | None]:
    """Return inputs and targets of one data-parallel rank, shaped as by the loader; None for what is not read."""
    inputs, targets = _whole_batch(spec)
    return inputs if trainer.reads_inputs else None, targets if trainer.reads_targets else None


def _whole_batch(spec: TrialSpec) -> tuple[Tensor, Tensor]:
    model, workload = spec.workload.model, spec.workload
    rows = workload.global_batch_size // spec.candidate.layout.dp
    if isinstance(model, LlamaModel | HuggingFaceModel):
        size = (rows, workload.seq_length)  # the longest micro-batch of any batching
        is_packed = spec.candidate.loader.batching == "packing"
        tokens = torch.zeros((rows, 2, workload.seq_length) if is_packed else size, dtype=torch.long)
        return tokens, torch.zeros(size, dtype=torch.long)
    if isinstance(model, LinearModel):
        return torch.zeros(rows, model.size), torch.zeros(rows, model.size)
    if isinstance(workload.data, PythonData):
        sample = collated([open_user_data(workload.data)[0]], workload.data.dataset)
        inputs, targets = (torch.zeros((rows, *one.shape[1:]), dtype=one.dtype) for one in sample)
        return inputs, targets
    assert isinstance(model, ResNetModel), "dry runs do not support custom programs"
    images = torch.zeros(rows, 3, model.image_size, model.image_size)
    return images, torch.zeros(rows, dtype=torch.long)


def track_layers(part: ModelPart, recompute: Recompute, kernels: Kernels, tracker: MemoryTracker) -> None:
    """Report to the tracker which layer the forward or backward pass has reached, and when gradients appear."""
    chunk = part.chunk.chunk

    def begin(_module: nn.Module, _args: Any) -> None:
        if not in_backward():
            tracker.phase, tracker.place = "forward", f"{chunk} before"

    def end(_module: nn.Module, _args: Any, output: Any) -> None:
        if not in_backward():
            tracker.place = f"{chunk} after"
            _track_backward(output, tracker.place, tracker)

    for layer, name in zip(part.model.layers.values(), _layer_names(part, recompute), strict=True):
        _track_layer(layer, f"{chunk}.{name}", tracker)
    part.model.register_forward_pre_hook(begin)
    part.model.register_forward_hook(end)
    _claim_gradients(part.model, [*compiled_units(part.model, kernels)], tracker)


def _layer_names(part: ModelPart, recompute: Recompute) -> list[str]:
    return [name for run in runs_of_chunk(recompute, part.chunk) for name in run.place_names]


def _track_layer(layer: nn.Module, name: str, tracker: MemoryTracker) -> None:
    def enter(*_: Any) -> None:
        if not in_backward():
            tracker.place = name

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        if not in_backward():
            _track_backward(output, name, tracker)

    layer.register_forward_pre_hook(_outside_graphs(enter))
    layer.register_forward_hook(_outside_graphs(leave))


def _outside_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook as one that no graph contains."""
    outside: Callable[..., Any] = torch._dynamo.disable(hook)  # type: ignore[no-untyped-call]
    return outside


def _track_backward(output: Any, place: str, tracker: MemoryTracker) -> None:
    """Set the backward pass's place to ``place`` when the gradient of ``output`` arrives."""

    def arrive(_grads: Any) -> None:
        tracker.place = place

    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(arrive)


def _claim_gradients(model: nn.Module, compiled: Sequence[nn.Module], tracker: MemoryTracker) -> None:
    """Count gradients as such from when they appear, including those of parameters that FSDP gathered for this pass."""
    hooked: Any = WeakIdKeyDictionary()

    def claim(parameter: Tensor) -> None:
        tracker.assign([parameter.grad], "grad")

    def find(module: nn.Module, _args: Any, *, recurse: bool) -> None:
        for parameter in module.parameters(recurse):
            if parameter not in hooked:
                hooked[parameter] = True
                parameter.register_post_accumulate_grad_hook(claim)  # type: ignore[no-untyped-call]

    inside = {inner for unit in compiled for inner in unit.modules()}
    for unit in compiled:
        unit.register_forward_pre_hook(_outside_graphs(functools.partial(find, recurse=True)))
    for module in model.modules():
        if module not in inside and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(functools.partial(find, recurse=False))
