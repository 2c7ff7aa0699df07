"""What a LightningCLI command of the user's own says of strategy, batch and number formats, and how to change it."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.recipes.gaps import TORCH_SCALER
from orchestrator.recipes.lightning.given import NOTHING, LightningArguments, is_cli
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.overlays.findings import ReadingDraft, without_pipeline
from orchestrator.recipes.overlays.lay import Laying, OverlayPart
from orchestrator.recipes.training import OverlayRequest, Reading, Run
from trials.spec import LossScale

_DDP = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false", "ddp_spawn")
_STAGES = {"fsdp": 3, "deepspeed": 2, **{f"deepspeed_stage_{stage}": stage for stage in (1, 2, 3)}}
_FORMATS = {
    **dict.fromkeys(("32-true", "32", "None"), ("O0", "float32")),
    "bf16-mixed": ("O1", "bfloat16"),
    "16-mixed": ("O1", "float16"),
}
_NAMES = {("O0", "float32"): "32-true", ("O1", "bfloat16"): "bf16-mixed", ("O1", "float16"): "16-mixed"}
_NO_FSDP = "Lightning's strategy fsdp refuses CPUs"
_NO_CLI = "the program does not take LightningCLI's arguments: put the knobs' placeholders into run"


def read(run: Run) -> Reading:
    """A command in our words, the Trainer's defaults included; of other programs than LightningCLI's nothing."""
    return read_edit(Edit.of_run(run))


def read_edit(edit: Edit) -> Reading:
    given, found = LightningArguments(edit), ReadingDraft()
    if not is_cli(edit.argv):
        found.warn("workload", _NO_CLI)
        return Reading(values={}, notes=tuple(found.notes))
    found.say({**without_pipeline(), "layout.tp": 1, "layout.cp": 1, "layout.num_copies": 1})
    _read_strategy(given, found)
    _read_precision(given, found)
    _read_data(given, found)
    number = found.whole("micro_batch_size", "accumulate_grad_batches", given.get("trainer.accumulate_grad_batches", 1))
    seed = given.get("seed_everything", None)
    return Reading(
        values=found.values,
        num_microbatches=number,
        seed=found.whole("workload", "seed_everything", seed) if str(seed).isdigit() else None,
        notes=tuple(found.notes),
    )


def _read_strategy(given: LightningArguments, found: ReadingDraft) -> None:
    strategy = given.get("trainer.strategy", "auto")
    if strategy in _DDP:
        found.say({"layout.zero_stage": 0, "layout.dp_shard": 1})
    elif isinstance(strategy, str) and strategy in _STAGES:
        found.say({"layout.zero_stage": _STAGES[strategy], "layout.dp_replicate": 1})
        if strategy == "fsdp" and given.get("trainer.accelerator", "auto") == "cpu":
            found.refuse("layout.zero_stage", _NO_FSDP)
    else:
        found.unread("layout.zero_stage", f"trainer.strategy {strategy}")


def _read_precision(given: LightningArguments, found: ReadingDraft) -> None:
    name = str(given.get("trainer.precision", "32-true"))
    if name not in _FORMATS:
        found.unread("precision", f"trainer.precision {name}")
        return
    level, dtype = _FORMATS[name]
    found.say({"precision.level": level, "precision.dtype": dtype, "precision.white": (), "precision.black": ()})
    if dtype == "float16":
        found.say(TORCH_SCALER)


def _read_data(given: LightningArguments, found: ReadingDraft) -> None:
    for path, name in (("micro_batch_size", "batch_size"), ("loader.num_workers", "num_workers")):
        full = given.of_data(name)
        if full is not None:
            found.say({path: found.whole(path, full, given.get(full))})
        elif path == "micro_batch_size":
            found.warn(path, f"neither data.{name} nor data.init_args.{name} is given: it is not known")
    workers = found.values.get("loader.num_workers")
    if workers is not None:
        found.say({"loader.prefetch_factor": 2 if workers else 0})


# ---- writing ----


def _write_strategy(edit: Edit, request: OverlayRequest) -> None:
    """Write the strategy; with a single rank it means nothing and stays as it is."""
    given, layout = LightningArguments(edit), request.candidate.layout
    if layout.dp == 1 or not is_cli(edit.argv):
        return
    if layout.zero_stage == 0:
        given.put("trainer.strategy", "ddp")
    else:
        given.put("trainer.strategy", "fsdp" if layout.zero_stage == 3 else f"deepspeed_stage_{layout.zero_stage}")
    if layout.zero_stage == 3 and request.device == "cpu":
        edit.refuse("layout.zero_stage", _NO_FSDP)
    if layout.zero_stage and layout.dp_replicate > 1:
        edit.refuse("layout.dp_replicate", "strategies that shard do so over all ranks")


def _write_precision(edit: Edit, request: OverlayRequest) -> None:
    if not is_cli(edit.argv):
        return
    precision = request.candidate.precision
    name = _NAMES.get((precision.level, precision.dtype))
    if name is None:
        edit.refuse("precision.level", "Lightning's 16-bit formats with fp32 weights are those of level O1")
        return
    LightningArguments(edit).put("trainer.precision", name)
    scale = precision.loss_scale
    if scale is not None and dataclasses.asdict(scale) != _torch_scale():
        edit.refuse("precision.loss_scale", "the scale is that of torch's GradScaler: 65536, doubled every 2000 steps")


def _torch_scale() -> dict[str, Any]:
    names = {path.rpartition(".")[2]: value for path, value in TORCH_SCALER.items()}
    return dataclasses.asdict(LossScale(**names))


def _write_data(edit: Edit, request: OverlayRequest) -> None:
    if not is_cli(edit.argv):
        return
    given, candidate = LightningArguments(edit), request.candidate
    pairs = (
        ("micro_batch_size", "batch_size", candidate.micro_batch_size),
        ("loader.num_workers", "num_workers", candidate.loader.num_workers),
    )
    for path, name, value in pairs:
        if request.changes(path, value):
            given.put(given.of_data(name) or f"data.{name}", value)


def _write_batch(edit: Edit, request: OverlayRequest) -> None:
    if is_cli(edit.argv):
        LightningArguments(edit).put("trainer.accumulate_grad_batches", request.num_microbatches)


def _write_seed(edit: Edit, seed: int) -> None:
    if is_cli(edit.argv):
        LightningArguments(edit).put("seed_everything", seed)


def _check(edit: Edit, request: OverlayRequest) -> None:
    """Write how many ranks there are, which Lightning compares with what it finds."""
    if not is_cli(edit.argv):
        return
    given = LightningArguments(edit)
    nodes = given.get("trainer.num_nodes", 1)
    nodes = int(nodes) if str(nodes).isdigit() and int(nodes) > 0 else 1
    if request.world_size % nodes:
        nodes = 1
        given.put("trainer.num_nodes", nodes)
    if str(given.get("trainer.devices", "auto")) != str(request.world_size // nodes):
        given.put("trainer.devices", request.world_size // nodes)
    if given.get("trainer.overfit_batches", 0) not in (0, "0", 0.0, NOTHING):
        edit.warn("workload", "trainer.overfit_batches: every step sees the same few batches")


LAYING = Laying(
    parts=(
        OverlayPart(paths=("layout.zero_stage", "layout.dp_shard", "layout.dp_replicate"), write=_write_strategy),
        OverlayPart(
            paths=("precision.level", "precision.dtype", "precision.loss_scale.initial"), write=_write_precision
        ),
        OverlayPart(paths=("micro_batch_size", "loader.num_workers"), write=_write_data),
    ),
    read=read_edit,
    batch=_write_batch,
    seed=_write_seed,
    check=_check,
)
