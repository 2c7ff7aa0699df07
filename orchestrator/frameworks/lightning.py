"""Lightning: ``main.py fit --config FILE --trainer.key value``, and other scripts, which only placeholders can change.

Arguments override the files of ``--config``. Names and defaults are those of Lightning 2.6.6. The reporting hook is a
callback that measures and stops both kinds of programs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.frameworks import arguments
from orchestrator.frameworks.arguments import Argument, Words
from orchestrator.frameworks.documents import ABSENT
from orchestrator.frameworks.edit import (
    Edit,
    EditedFile,
    FrameworkTable,
    Overlay,
    OverlayRequest,
    Reading,
    Run,
    Training,
    contradictions,
)
from orchestrator.frameworks.gaps import TORCH_SCALER, num_microbatches, takes_torch_scaler, without_pipeline
from orchestrator.frameworks.launchers import imports, script_text
from orchestrator.frameworks.spelling import Found, Note, SettingsBuilder, custom, number, row
from trials.script.command import Expected, LogFormat

STRATEGY, PRECISION = "trainer.strategy", "trainer.precision"
BATCH, WORKERS = "data.batch_size", "data.num_workers"
ACCUMULATED, SEED = "trainer.accumulate_grad_batches", "seed_everything"
_DDP = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false", "ddp_spawn")
_STAGES = {"fsdp": 3, "deepspeed": 2, **{f"deepspeed_stage_{stage}": stage for stage in (1, 2, 3)}}
_FORMATS = {
    **dict.fromkeys(("32-true", "32", "None"), ("O0", "float32")),
    "bf16-mixed": ("O1", "bfloat16"),
    "16-mixed": ("O1", "float16"),
}
_NAMES = {("O0", "float32"): "32-true", ("O1", "bfloat16"): "bf16-mixed", ("O1", "float16"): "16-mixed"}
_NO_FSDP = "Lightning's strategy fsdp does not support CPUs"
_NO_CLI = "the program does not accept LightningCLI arguments: put placeholders for the knobs into run"
CONFIG = Argument(name="--config", aliases=("-c",))
_SECTIONS = ("--trainer.", "--trainer=", "--data.", "--data=", "--model.", "--model=")
_PACKAGES = {"lightning", "pytorch_lightning", "lightning_fabric"}


def recognises(run: Run) -> bool:
    text = script_text(run.argv, run.cwd)
    return bool(_PACKAGES & imports(text)) if text else is_cli(run.argv)


def is_cli(argv: Words) -> bool:
    """Whether the program takes LightningCLI's arguments, judged by the command."""
    return "fit" in argv or any(word.startswith(_SECTIONS) for word in argv)


def find_files(argv: Words, cwd: str) -> Mapping[str, str]:
    """The files of ``--config``, in order."""
    if not is_cli(argv):
        return {}
    words = [word for word in _configs(argv) if "{" not in word and Path(cwd, word).is_file()]
    return {f"config{number or ''}": str(Path(cwd, word)) for number, word in enumerate(words)}


def _configs(argv: Words) -> Iterator[str]:
    for index, word in enumerate(argv):
        if word in CONFIG.spellings and index + 1 < len(argv):
            yield argv[index + 1]
        elif word.startswith("--config="):
            yield word.partition("=")[2]


class LightningArguments:
    """Settings of a command by dotted name."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        placed = [word.rpartition("=")[2][1:-1] for word in _configs(edit.argv)]
        names = [name for name in placed if name in edit.files]
        for name in names:
            edit.names[name] = f"{name}.yaml"
        self._files = [EditedFile(edit, name) for name in names]

    def get(self, name: str, default: Any = None) -> Any:
        """The effective value; ``default`` if the command has none."""
        value = self._value(self._spelled(name))
        return default if value is ABSENT else value

    def put(self, values: Mapping[str, Any]) -> None:
        """Write arguments at the end, after every ``--config``, since the last value counts."""
        for name, value in values.items():
            argument = Argument(name=f"--{self._spelled(name)}")
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            if arguments.read_text(self._edit.argv, argument) != text:
                self._edit.argv = (*arguments.remove(self._edit.argv, argument), f"{argument.name}={text}")

    def drop(self, *names: str) -> None:
        for name in names:
            self._edit.argv = arguments.remove(self._edit.argv, Argument(name=f"--{name}"))

    def _spelled(self, name: str) -> str:
        """The name in this command; the data module may be one of several classes."""
        other = name.replace("data.", "data.init_args.", 1)
        is_other = name.startswith("data.") and self._value(name) is ABSENT and self._value(other) is not ABSENT
        return other if is_other else name

    def _value(self, name: str) -> Any:
        configured = arguments.read_text(self._edit.argv, Argument(name=f"--{name}"))
        if configured is not None:
            return None if configured.lower() in ("null", "none") else configured
        keys = ((file, key) for file in reversed(self._files) for key in (name, f"fit.{name}"))
        return next((file.get(key) for file, key in keys if file.has(key)), ABSENT)


# The rows


def _write_strategy(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    if layout.dp == 1:
        return  # a single rank: all strategies are equivalent
    stage = layout.zero_stage
    builder.settings[STRATEGY] = "ddp" if stage == 0 else "fsdp" if stage == 3 else f"deepspeed_stage_{stage}"
    if stage and layout.dp_replicate > 1:
        builder.refuse("layout.dp_replicate", "sharding strategies always use all ranks")


def _read_strategy(found: Found) -> dict[str, Any]:
    strategy = found.get(STRATEGY)
    if strategy in _DDP:
        return {"layout.zero_stage": 0, "layout.dp_shard": 1}
    if not isinstance(strategy, str) or strategy not in _STAGES:
        found.unread("layout.zero_stage", f"{STRATEGY} {strategy}")
        return {}
    if strategy == "fsdp" and found.get("trainer.accelerator") == "cpu":
        found.refuse("layout.zero_stage", _NO_FSDP)
    return {"layout.zero_stage": _STAGES[strategy], "layout.dp_replicate": 1}


def _write_precision(builder: SettingsBuilder) -> None:
    precision = builder.candidate.precision
    name = _NAMES.get((precision.level, precision.dtype))
    if name is None:
        builder.refuse("precision.level", "Lightning's 16-bit formats with fp32 weights correspond to level O1")
        return
    builder.settings[PRECISION] = name
    if precision.loss_scale is not None and not takes_torch_scaler(builder):
        builder.refuse(
            "precision.loss_scale", "the loss scale is that of torch's GradScaler: 65536, doubled every 2000 steps"
        )


def _read_precision(found: Found) -> dict[str, Any]:
    name = str(found[PRECISION])
    if name not in _FORMATS:
        found.unread("precision", f"{PRECISION} {name}")
        return {}
    level, dtype = _FORMATS[name]
    scale = TORCH_SCALER if dtype == "float16" else {}
    return {"precision.level": level, "precision.dtype": dtype, "precision.white": (), "precision.black": (), **scale}


def _read_micro_batch(found: Found) -> dict[str, Any]:
    if found.get(BATCH) is None:
        found.warn(
            "micro_batch_size", f"neither {BATCH} nor data.init_args.batch_size is set: the batch size is unknown"
        )
    return {"micro_batch_size": found.whole("micro_batch_size", BATCH)}


def _read_workers(found: Found) -> dict[str, Any]:
    workers = found.whole("loader.num_workers", WORKERS)
    ahead = {} if workers is None else {"loader.prefetch_factor": 2 if workers else 0}
    return {"loader.num_workers": workers, **ahead}


def _write_batch(builder: SettingsBuilder) -> None:
    builder.settings[ACCUMULATED] = num_microbatches(builder)


def _read_batch(found: Found) -> dict[str, Any]:
    found.num_microbatches = found.whole("micro_batch_size", ACCUMULATED)
    return {}


def _read_seed(found: Found) -> dict[str, Any]:
    seed = str(found.get(SEED))
    return {"workload.seed": int(seed) if seed.isdigit() else None}


_ALWAYS = {**without_pipeline(), "layout.tp": 1, "layout.cp": 1, "layout.num_copies": 1}
ROWS = (
    custom(_ALWAYS, (), lambda _: None, lambda _: _ALWAYS, overlay="read"),
    row(("layout.zero_stage", "layout.dp_shard", "layout.dp_replicate"), STRATEGY, _write_strategy, _read_strategy),
    row(
        ("precision.level", "precision.dtype", "precision.loss_scale.initial"),
        PRECISION,
        _write_precision,
        _read_precision,
    ),
    replace(number("micro_batch_size", BATCH), read=_read_micro_batch),
    replace(number("loader.num_workers", WORKERS), read=_read_workers),
    row("workload.global_batch_size", ACCUMULATED, _write_batch, _read_batch),
    replace(number("workload.seed", SEED), read=_read_seed),
)


def _check(edit: Edit, request: OverlayRequest) -> None:
    """Write the number of ranks, which Lightning checks."""
    given, layout = LightningArguments(edit), request.candidate.layout
    nodes = given.get("trainer.num_nodes", 1)
    nodes = int(nodes) if str(nodes).isdigit() and int(nodes) > 0 else 1
    if request.world_size % nodes:
        nodes = 1
        given.put({"trainer.num_nodes": nodes})
    if str(given.get("trainer.devices", "auto")) != str(request.world_size // nodes):
        given.put({"trainer.devices": request.world_size // nodes})
    if given.get("trainer.overfit_batches", 0) not in (0, "0", 0.0):
        edit.warn("workload", "trainer.overfit_batches: every step uses the same few batches")
    is_new = request.changes("layout.zero_stage", layout.zero_stage)
    if layout.zero_stage == 3 and layout.dp > 1 and request.device == "cpu" and is_new:
        edit.refuse("layout.zero_stage", _NO_FSDP)


TABLE = FrameworkTable(
    rows=ROWS,
    command=LightningArguments,
    defaults={STRATEGY: "auto", PRECISION: "32-true", ACCUMULATED: 1},
    model=lambda edit, found: None,  # noqa: ARG005
    check=_check,
)


def _read(run: Run) -> Reading:
    """A command in our terms, including the Trainer's defaults; empty for programs without LightningCLI."""
    if not is_cli(run.argv):
        return Reading(values={}, notes=(Note(knob="workload", message=_NO_CLI, severity="warning"),))
    return replace(TABLE.read(run), world_size=_num_ranks(LightningArguments(Edit.of_run(run))))


def _num_ranks(given: LightningArguments) -> int | None:
    """Devices times nodes; None if Lightning uses all that exist."""
    devices, nodes = given.get("trainer.devices", "auto"), given.get("trainer.num_nodes", 1)
    if isinstance(devices, list):
        devices = len(devices)
    counts = [int(str(count)) for count in (devices, nodes) if str(count).isdigit() and int(str(count))]
    return math.prod(counts) if len(counts) == 2 else None


def _overlay(run: Run, request: OverlayRequest) -> Overlay:
    if is_cli(run.argv):
        return TABLE.overlay(run, request)
    edit = Edit.of_run(run)
    edit.notes = contradictions(request, Reading(values={}))
    return edit.overlay()


# A trial

_OFF: dict[str, Any] = {
    "trainer.logger": False,
    "trainer.enable_checkpointing": False,
    "trainer.limit_val_batches": 0,
    "trainer.num_sanity_val_steps": 0,
    "trainer.enable_progress_bar": False,
    "trainer.enable_model_summary": False,
    "trainer.log_every_n_steps": 1,
    "trainer.profiler": None,
    "trainer.max_time": None,
    "trainer.max_epochs": -1,
    "trainer.default_root_dir": "{out}",
}
_ROOT = "PL_TRAINER_DEFAULT_ROOT_DIR"
"""Lightning's variable for the folder of its Trainer's logs and checkpoints, unless the program sets one."""
_NEED_WHAT_IS_OFF = ("Checkpoint", "LearningRateMonitor", "DeviceStatsMonitor", "EarlyStopping", "ModelSummary")
"""Callbacks that fail, or have no effect, without logger, checkpoints and validation."""


def _trial_mode(made: Overlay, last_step: int) -> Overlay:
    """The trial without logger, checkpoints and validation; ``max_steps`` ends it. A program without LightningCLI stays
    unchanged except for its output folder, since its callbacks may need a logger or checkpoints. The hook ends it, and
    its learning-rate schedule is that of the full run."""
    edit = Edit.of_overlay(made)
    if not is_cli(edit.argv):
        return replace(made, env={**made.env, _ROOT: "{out}"})
    given = LightningArguments(edit)
    callbacks = given.get("trainer.callbacks")
    if isinstance(callbacks, list):
        kept = [one for one in callbacks if not _needs_what_is_off(one)]
        if kept != callbacks:
            given.put({"trainer.callbacks": json.dumps(kept)})
    given.drop("ckpt_path")
    if given.get("ckpt_path") is not None:
        given.put({"ckpt_path": None})
    given.put({**_OFF, "trainer.max_steps": last_step})
    return edit.overlay()


def _needs_what_is_off(callback: Any) -> bool:
    name = str(callback.get("class_path", "")) if isinstance(callback, dict) else str(callback)
    return name.rpartition(".")[2].endswith(_NEED_WHAT_IS_OFF)


def _expected(request: OverlayRequest) -> Expected:
    """The values to observe inside the program; a rank's samples only if the command sets its batch."""
    candidate, layout = request.candidate, request.candidate.layout
    configured = request.reading.values
    return Expected(
        world_size=request.world_size,
        micro_batch_size=candidate.micro_batch_size if "micro_batch_size" in configured else None,
        num_microbatches=request.num_microbatches,
        dtype=candidate.precision.dtype if "precision.dtype" in configured else None,
        parameter_shards=layout.dp_shard if layout.zero_stage == 3 and layout.dp_shard > 1 else None,
    )


TRAINING = Training(
    name="lightning",
    title="Lightning",
    package="pytorch-lightning",
    releases=">=2.2,<3",
    log=LogFormat(name="lightning"),
    recognises=recognises,
    find_files=find_files,
    read=_read,
    overlay=_overlay,
    trial_mode=_trial_mode,
    expected=_expected,
)
