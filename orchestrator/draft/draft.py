"""A first sweep file as text: commented, of at most thirty lines, complete and validated."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.settings import BaselineSection
from orchestrator.config.sweep import load_sweep
from orchestrator.draft.machine import DraftedMachine, comment, safe_name, sweep_text, value_text, yaml_words
from orchestrator.draft.model_config import DraftedModel
from orchestrator.errors import ConfigError
from orchestrator.frameworks.catalog import training
from orchestrator.search.predictor import Prediction, UnpredictableError, make_predictor, predict
from orchestrator.space.rules import check
from orchestrator.space.space import build_candidate
from orchestrator.units import num_bytes
from trials.files import fields_json, write_atomically
from trials.legality import DATA_OF_MODEL
from trials.spec import Candidate, Data, ImageFolderData, RandomData, TextData, Workload

# What a draft proposes: a batch, a baseline that fits into memory, and the usual knobs.


Knobs = Mapping[str, Any]
COMFORTABLE_SHARE = 0.5
"""Fraction of memory up to which a baseline without sharding is assumed to be what users run today."""
DEFAULT_SEQ_LENGTH = 4096
SAMPLES_PER_DEVICE = {"resnet": 64, "linear": 1024}
TOKENS_PER_STEP = ((1e9, 2**19), (6e9, 2**21))
"""Tokens of a usual global batch, by maximum number of weights of a decoder; 2^22 for larger ones."""
_DATA: Mapping[str, Data] = {data.kind: data for data in (TextData(), ImageFolderData(), RandomData())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The sections ``baseline`` and ``space`` of a draft, and the prediction for the baseline."""

    workload: Workload
    baseline: Knobs
    space: Knobs
    prediction: Prediction | None
    """None if the cost model does not know the hardware."""


def drafted_workload(
    model: DraftedModel, machine: DraftedMachine, seq_length: int | None, global_batch_size: int | None
) -> Workload:
    """The workload: sequences of the model's length, up to 4096 tokens, and a usual batch for all devices."""
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
            f"no typical configuration is valid: {reason}",
            remedy="Set --global-batch-size to a multiple of the number of devices, or change --seq-length.",
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
        if found.fits and (
            not is_plain or len(legal) == 1 or found.peak_bytes <= COMFORTABLE_SHARE * found.limit_bytes
        ):
            return knobs, found
    assert least is not None
    raise ConfigError(
        f"the model does not fit on {machine.label}: it needs at least {num_bytes(least.peak_bytes)} per device, but "
        f"each device has only {num_bytes(least.limit_bytes)}",
        remedy="Add nodes (--nodes), or choose a larger cluster, such as --cluster dgx-h100 --nodes 8.",
    )


def _baselines(model: DraftedModel, machine: DraftedMachine) -> Iterator[Knobs]:
    """Usual configurations over all devices, by decreasing memory."""
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
    degrees = _powers(min(8, machine.devices_per_node))
    if experts := model.keys.get("experts"):
        yield "ep", [ep for ep in degrees if experts["num_experts"] % ep == 0 and num_devices % ep == 0]
    else:
        yield "tp", [tp for tp in degrees if heads % tp == 0 and num_devices % tp == 0]
    stages = [pp for pp in _powers(8) if num_devices % pp == 0 and model.keys["num_layers"] >= 2 * pp]
    if weights > 5e9 and len(stages) > 1 and machine.num_nodes > 1:
        yield "pp", stages


def _precision(machine: DraftedMachine) -> list[Any]:
    """Number formats to try, today's first: 16 bits are standard on GPUs."""
    if not machine.is_gpu:
        return ["O0", "O1"]
    if machine.number_format == "bfloat16":
        return ["O1", "O2"]
    return [{"level": level, "dtype": machine.number_format} for level in ("O1", "O2")]


def _powers(most: int, start: int = 1) -> list[int]:
    """The powers of two from ``start`` to ``most``."""
    return [1 << n for n in range(most.bit_length()) if start <= 1 << n <= most]


_PATIENCE = {"starting_s": (600.0, 0), "warmup_s": (300.0, 40), "measuring_s": (600.0, 200), "stall_s": (300.0, 30)}
"""A trial's deadlines: minimum seconds, and a number of steps at the predicted pace of the baseline. The loss gate
trains twenty steps in float32, which may take ten times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDraft:
    """A sweep file that is not written yet, with remarks."""

    name: str
    text: str
    hardware: str
    choices: Choices
    simulated: bool
    differences: tuple[str, ...]
    """How the trained model differs from the requested one."""
    max_trials: int

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``init --json``, without the file."""
        workload, expected = self.choices.workload, self.choices.prediction
        return {
            **fields_json(self, "name", "hardware", "simulated", "differences"),
            **fields_json(workload, "seq_length", "global_batch_size"),
            **fields_json(self.choices, "baseline", "space"),
            "max_trials": self.max_trials,
            "expected": expected.to_json() if expected is not None else None,
        }


def make_draft(
    model: DraftedModel,
    machine: DraftedMachine,
    *,
    name: str | None = None,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    max_trials: int | None = None,
) -> SweepDraft:
    """The sweep file for a model on a machine.

    Raises:
        ConfigError: the model does not fit there, or sizes do not go together.
    """
    choices = choose(model, machine, drafted_workload(model, machine, seq_length, global_batch_size))
    trials = max_trials or (25 if machine.is_gpu else 12)
    name = name or safe_name(model.name)
    return SweepDraft(
        name=name,
        text=sweep_text(list(_lines(name, model, machine, choices, trials))),
        hardware=machine.label,
        choices=choices,
        simulated=machine.is_simulated,
        differences=model.differences,
        max_trials=trials,
    )


def require_room(file: Path, *, force: bool) -> None:
    """Raises:
    ConfigError: the file exists and must not be overwritten, or its folder does not exist.
    """
    if file.exists() and not force:
        raise ConfigError(
            "the file already exists",
            file=file,
            remedy="Choose another file with --output, or overwrite it with --force.",
        )
    if not file.absolute().parent.is_dir():
        raise ConfigError(
            "the directory does not exist",
            file=file,
            remedy="Create the directory, or choose another file with --output.",
        )


def write_draft(text: str, file: Path, *, force: bool) -> None:
    """Write the sweep file after validating it.

    Raises:
        ConfigError: the file already exists, or ``plan`` does not accept the text.
    """
    require_room(file, force=force)
    trial = file.with_name(f".{file.name}.draft")
    try:
        write_atomically(trial, [text.encode()])
        load_sweep(trial)
        trial.replace(file)
    except ConfigError as error:
        raise ConfigError(error.message, key=error.key, remedy=error.remedy or "") from None
    finally:
        trial.unlink(missing_ok=True)


def _lines(name: str, model: DraftedModel, machine: DraftedMachine, choices: Choices, max_trials: int) -> Iterator[str]:
    workload, size = choices.workload, model.num_parameters
    yield from comment(f"{name}: {model.source}{f', {_count(size)} weights' if size else ''}, on {machine.label}.")
    if model.differences:
        yield from comment(f"Approximation of the model: {'; '.join(model.differences)}.")
    for remark in machine.remarks:
        yield from comment(remark)
    yield from (f"name: {name}", "", "workload: # the same in every trial")
    yield f"  model: {value_text(model.keys)}"
    if model.keys["kind"] == "llama":
        yield "  data: {kind: text, path: null} # sample data; for yours: {kind: token_file, path: FILE, dtype: uint16}"
        yield f"  seq_length: {workload.seq_length}"
    batch = workload.global_batch_size
    tokens = f": {_count(batch * workload.seq_length)} tokens" if workload.seq_length > 1 else ""
    yield f"  global_batch_size: {batch} # samples per optimiser step{tokens}"
    yield from (f"cluster: {machine.section}", "")
    yield "# Replace this with what you run today: it is always the first trial, and the winner is compared with it."
    if choices.prediction is not None:
        yield f"# Predicted: {expected_text(choices.prediction)}."
    yield f"baseline: {value_text(choices.baseline)}"
    yield from ("", "space: # knobs to tune; all knobs: docs/knobs.md")
    yield from (f"  {key}: {value_text(value)}" for key, value in choices.space.items())
    if limits := _deadlines(choices):
        yield f"deadlines: {value_text(limits)} # large models start and compile slowly"
    yield f"budget: {value_text({'max_trials': max_trials})}"


def expected_text(found: Prediction) -> str:
    """Predicted time and memory of a baseline, in words."""
    memory = f"{num_bytes(found.peak_bytes)} of {num_bytes(found.limit_bytes)} memory"
    return f"{found.step_s:.3g} s per step, {memory}"


def _deadlines(choices: Choices) -> dict[str, int]:
    """Deadlines for trials that need more than the defaults; empty if those suffice."""
    found = choices.prediction
    if found is None or found.step_s < 2.0:
        return {}
    limits = {key: max(least, steps * found.step_s) for key, (least, steps) in _PATIENCE.items()}
    return {key: math.ceil(limit_s / 100) * 100 for key, limit_s in limits.items()}


def _count(number: int) -> str:
    """A large number in words."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


# A sweep file template, for users who know the framework but have no command yet.


_BATCH: Mapping[str, Any] = {"micro_batch_size": [1, 2, 4, 8]}
_USUAL: Mapping[str, Any] = {**_BATCH, "recompute": ["none", "full"]}
_PLACED = "--batch-size {micro_batch_size} --accumulation {accumulation}"
TYPICAL: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "megatron": ("python pretrain_gpt.py --your-arguments", {"tp": [1, 2, 4, 8], "pp": [1, 2, 4], **_USUAL}),
    "torchtitan": ("-m torchtitan.train --module llama3 --config llama3_8b", {"tp": [1, 2], **_USUAL}),
    "deepspeed": ("python train.py --deepspeed_config ds_config.json", {"zero_stage": [1, 2, 3], **_BATCH}),
    "transformers": ("python train.py --output_dir out --per_device_train_batch_size 1", _USUAL),
    "accelerate": (f"python train.py {_PLACED}", _BATCH),
    "lightning": ("python main.py fit --config config.yaml", _BATCH),
    "llamafactory": ("python -m llamafactory.launcher train.yaml", _USUAL),
    "ms-swift": ("swift sft --your-arguments", _USUAL),
    "mindformers": ("msrun --worker_num 8 run_mindformer.py --config config.yaml", {"tp": [1, 2, 4, 8], **_USUAL}),
    "paddlenlp": ("python -m paddle.distributed.launch run_pretrain.py config.json", {"tp": [1, 2, 4, 8], **_USUAL}),
    "custom": (f"python train.py {_PLACED}", _BATCH),
}
"""A usual command by recipe, and the knobs that matter for most of its programs."""


def skeleton(recipe: str, machine: DraftedMachine, *, max_trials: int | None = None) -> str:
    """The text of a sweep file in which the command and its workload have to be filled in.

    Raises:
        ConfigError: unknown recipe.
    """
    known = training(recipe)
    command, space = TYPICAL[recipe]
    lines = [
        f"# {known.title}, on {machine.label}. Replace `run` with your command, then: tune-cluster check FILE",
        "# Easier: tune-cluster init -- COMMAND reads all of this from the command.",
        f"name: {recipe}",
        "",
        "workload: # your training program; all keys: docs/your-own-training.md",
        f"  recipe: {recipe}",
        f"  run: {yaml_words(shlex.split(command))}",
    ]
    is_placed = _PLACED in command
    if is_placed:
        lines.append("  global_batch_size: 64 # samples per optimiser step over all devices, as used today")
    lines += [f"cluster: {machine.section}", ""]
    devices = machine.topology.num_devices
    lines.append(
        f"baseline: {{dp_replicate: {devices}, micro_batch_size: 1}} # the values used today"
        if is_placed
        else "baseline: from_run # the command unchanged, always the first trial"
    )
    lines.append("space: # knobs to tune; all others keep their value. Reference: docs/knobs.md")
    lines += [f"  {key}: {value_text(value)}" for key, value in space.items()]
    lines += ["deadlines: {starting_s: 600}", f"budget: {{max_trials: {max_trials or 12}}}"]
    return sweep_text(lines)
