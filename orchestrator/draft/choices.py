"""What a draft proposes: a batch, a baseline that fits into memory, and the usual knobs to turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config.knobs import BaselineSection
from orchestrator.draft.machine import DraftedMachine
from orchestrator.draft.model import DraftedModel
from orchestrator.errors import ConfigError
from orchestrator.search.prediction.prediction import Prediction, make_predictor, predict
from orchestrator.search.prediction.predictor import UnpredictableError
from orchestrator.space.knobs.canonical import build_candidate
from orchestrator.space.rules import check
from orchestrator.units import num_bytes
from trials.legality.rules import DATA_OF_MODEL
from trials.spec import Candidate, Data, ImageFolderData, RandomData, TextData, Workload

Knobs = Mapping[str, Any]
ROOMY = 0.5
"""Share of the memory up to which a baseline without any sharding is taken to be what somebody runs today."""
DEFAULT_SEQ_LENGTH = 4096
SAMPLES_PER_DEVICE = {"resnet": 64, "linear": 1024}
TOKENS_PER_STEP = ((1e9, 2**19), (6e9, 2**21))
"""Tokens of a usual global batch for decoders of up to so many weights; 2^22 for larger ones."""
_DATA: Mapping[str, Data] = {data.kind: data for data in (TextData(), ImageFolderData(), RandomData())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The sections ``baseline`` and ``space`` of a draft, and what is expected of the baseline."""

    workload: Workload
    baseline: Knobs
    space: Knobs
    prediction: Prediction | None
    """None where the cost model does not know the hardware."""


def drafted_workload(
    model: DraftedModel, machine: DraftedMachine, seq_length: int | None, global_batch_size: int | None
) -> Workload:
    """The workload: sequences as long as the model's, up to 4096 tokens, and a usual batch for all devices."""
    shape, kind = model.shape, model.keys["kind"]
    tokens = seq_length or (min(model.max_seq_length or DEFAULT_SEQ_LENGTH, DEFAULT_SEQ_LENGTH))
    if kind != "llama":
        tokens = 1
    elif not machine.is_gpu and seq_length is None:
        tokens = min(tokens, 512)
    num_devices = machine.topology.num_devices
    if global_batch_size is None:
        per_device = SAMPLES_PER_DEVICE.get(kind, 8)
        wanted = _usual_tokens(model) // tokens if kind == "llama" and machine.is_gpu else per_device * num_devices
        global_batch_size = max(1, round(wanted / num_devices)) * num_devices
    data = _DATA[DATA_OF_MODEL[type(shape)][0].kind]
    return Workload(model=shape, data=data, seq_length=tokens, global_batch_size=global_batch_size)


def _usual_tokens(model: DraftedModel) -> int:
    weights = model.num_parameters or 0
    return next((tokens for limit, tokens in TOKENS_PER_STEP if weights <= limit), 2**22)


def choose(model: DraftedModel, machine: DraftedMachine, workload: Workload) -> Choices:
    """The first of the usual configurations that is legal and expected to fit.

    Raises:
        ConfigError: none is.
    """
    drafts = list(_baselines(model, machine))
    built = [(knobs, build_candidate(BaselineSection(**knobs).values(), workload.model)) for knobs in drafts]
    legal = [(knobs, candidate) for knobs, candidate in built if not check(candidate, workload)]
    if not legal:
        reason = check(built[0][1], workload)[0].reason
        raise ConfigError(
            f"no usual configuration is legal: {reason}",
            remedy="Give another --global-batch-size, a multiple of the number of devices, or another --seq-length.",
        )
    knobs, prediction = _first_that_fits(legal, machine, workload)
    space = dict(_space(model, machine, workload))
    return Choices(workload=workload, baseline=knobs, space=space, prediction=prediction)


def _first_that_fits(
    legal: list[tuple[Knobs, Candidate]], machine: DraftedMachine, workload: Workload
) -> tuple[Knobs, Prediction | None]:
    try:
        predictor = make_predictor(workload, tuple(candidate for _, candidate in legal), machine.topology)
    except UnpredictableError:  # sharding everything is the safest guess
        return next((knobs for knobs, _ in legal if knobs.get("recompute") == "full"), legal[0][0]), None
    least = None
    for row, (knobs, _) in enumerate(legal):
        found = predict(predictor, row, workload)
        least = found if least is None or found.peak_bytes < least.peak_bytes else least
        is_plain = "zero_stage" not in knobs and knobs.get("recompute") != "full"
        if found.fits and (not is_plain or len(legal) == 1 or found.peak_bytes <= ROOMY * found.limit_bytes):
            return knobs, found
    assert least is not None
    raise ConfigError(
        f"this model does not fit into {machine.label}: the least that one of its devices would need is "
        f"{num_bytes(least.peak_bytes)}, and there are {num_bytes(least.limit_bytes)}",
        remedy="Take more nodes (--nodes), or describe a cluster: --cluster dgx-h100 --nodes 8.",
    )


def _baselines(model: DraftedModel, machine: DraftedMachine) -> Iterator[Knobs]:
    """Usual configurations over all devices, from what needs the most memory to what needs the least."""
    num_devices, kind = machine.topology.num_devices, model.keys["kind"]
    common = {"micro_batch_size": 32 if kind != "llama" else 1, "precision": _precision(machine)[0]}
    spread = {"dp_replicate": num_devices} if num_devices > 1 else {}
    yield {**spread, **common}
    if kind != "llama":
        yield {**spread, **common, "micro_batch_size": 1}
        return
    if num_devices == 1:
        yield {**common, "recompute": "full"}
        return
    full = {**common, "recompute": "full"}
    yield {"dp_shard": num_devices, "zero_stage": 3, **full}
    for tp in _powers(min(machine.devices_per_node, num_devices), start=2):
        if num_devices % tp == 0:
            yield {"dp_shard": num_devices // tp, "zero_stage": 3, "tp": tp, **full}
    for pp in _powers(min(32, num_devices), start=2):
        tp = min(machine.devices_per_node, num_devices // pp)
        if num_devices % (pp * tp) == 0:
            shard = num_devices // pp // tp
            yield {"pp": pp, "tp": tp, "dp_shard": shard, "zero_stage": 3 if shard > 1 else 1, **full}


def _space(model: DraftedModel, machine: DraftedMachine, workload: Workload) -> Iterator[tuple[str, Any]]:
    """The knobs that matter for most models, with a few values each."""
    num_devices, kind = machine.topology.num_devices, model.keys["kind"]
    if num_devices > 1:
        degrees = [d for d in _powers(num_devices) if num_devices % d == 0]
        degrees = degrees if degrees[-1] == num_devices else [*degrees, num_devices]
        yield "dp_replicate", degrees
        yield "dp_shard", degrees
        yield "zero_stage", [1, 2, 3]
        yield from _model_parallel(model, machine)
    most = max(1, workload.global_batch_size // num_devices)
    sizes = [size for size in _powers(8 if kind == "llama" else 128) if size <= most and (kind == "llama" or size > 8)]
    yield "micro_batch_size", sizes or [1]
    if kind == "llama":
        yield "recompute", ["none", "full"]
    if kind == "resnet":
        yield "memory_format", ["nchw", "nhwc"]
    yield "precision", _precision(machine)
    if machine.is_gpu:
        yield "compile", ["off", "block"]


def _model_parallel(model: DraftedModel, machine: DraftedMachine) -> Iterator[tuple[str, Any]]:
    """Tensor parallelism inside a node, pipelines across nodes; for decoders."""
    weights, num_devices = model.num_parameters or 0, machine.topology.num_devices
    if not weights:
        return
    heads = model.keys["num_kv_heads"]
    yield "tp", [tp for tp in _powers(min(8, machine.devices_per_node)) if heads % tp == 0 and num_devices % tp == 0]
    stages = [pp for pp in _powers(8) if num_devices % pp == 0 and model.keys["num_layers"] >= 2 * pp]
    if weights > 5e9 and len(stages) > 1 and machine.num_nodes > 1:
        yield "pp", stages


def _precision(machine: DraftedMachine) -> list[Any]:
    """Number formats to try, today's first: on GPUs 16 bits are what everybody trains in."""
    if not machine.is_gpu:
        return ["O0", "O1"]
    if machine.number_format == "bfloat16":
        return ["O1", "O2"]
    return [{"level": level, "dtype": machine.number_format} for level in ("O1", "O2")]


def _powers(most: int, start: int = 1) -> list[int]:
    """The powers of two from ``start`` to ``most``."""
    return [1 << n for n in range(most.bit_length()) if start <= 1 << n <= most]
