"""Accelerate: exports of the launcher's YAML with TrainingArguments as JSON, and programs with an ``Accelerator`` and a
training loop of their own.

In such programs, the variables of ``accelerate launch`` set the engine and the number format,
``ACCELERATE_GRADIENT_ACCUMULATION_STEPS`` sets accumulation, and the script's arguments with common names set batch
size and workers. Names and defaults are those of Accelerate 1.15 (``commands/launch.py``, ``parallelism_config.py``,
``utils/dataclasses.py``) and transformers 5.23 (``training_args.py``).
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

import yaml

from orchestrator.frameworks.arguments import Argument, Words, either_dash, is_specified, read_text, remove, write
from orchestrator.frameworks.decoder_config import MODEL_SETTINGS, layer_class, model_files, model_settings, num_layers
from orchestrator.frameworks.edit import Edit, FrameworkTable, Overlay, OverlayRequest, Run, Training
from orchestrator.frameworks.gaps import (
    KERNELS_OF_SCRIPT,
    NO_FP32_MODULES,
    TORCH_SCALER,
    VARYING_LENGTHS,
    WHOLE_BETWEEN,
    left_to_script,
    memory_savers,
    no_pipeline,
    num_microbatches,
    offloads_inputs,
    own_data,
    refuse_fp8,
    takes_torch_scaler,
    unable,
)
from orchestrator.frameworks.launchers import imports, program_of, script_text, without_launcher
from orchestrator.frameworks.spelling import (
    Found,
    Recipe,
    Setting,
    Settings,
    SettingsBuilder,
    comments,
    custom,
    fixed,
    lacking,
    option,
    row,
    settings_of,
    tree,
)
from orchestrator.frameworks.trainer_arguments import (
    ACCUMULATION,
    ENGINE,
    MIXED_PRECISION,
    ShardingEngine,
    find_launch_files,
    is_of_engine,
)
from orchestrator.frameworks.transformers import (
    APPROXIMATED,
    LAYOUT,
    TOTAL,
    check_engine,
    edit_of,
    expected_of,
    fsdp_recomputes,
    full_recompute,
    opened,
    read_precision,
    trackers_off,
    write_precision_of_engine,
)
from trials.script.command import OUT, LogFormat
from trials.spec import Layout, LlamaModel

FILE = "accelerate.yaml"
ARGUMENTS = "training_args.json"
TYPE, NUM_PROCESSES = f"{FILE}:distributed_type", f"{FILE}:num_processes"
_PARALLELISM = f"{FILE}:parallelism_config.parallelism_config_"
SIZES = {name: f"{_PARALLELISM}{name}_size" for name in ("dp_replicate", "dp_shard", "cp", "tp")}
_CP_STRATEGY = f"{_PARALLELISM}cp_comm_strategy"
_FSDP = f"{FILE}:fsdp_config.fsdp_"
_MIRROR = f"{ARGUMENTS}:fsdp_config."
"""Prefix of the Trainer's arguments that repeat options of the launcher."""
_WRAP = tuple(
    f"{prefix}{name}"
    for prefix in (_FSDP, _MIRROR)
    for name in (
        "version",
        "reshard_after_forward",
        "auto_wrap_policy",
        "transformer_layer_cls_to_wrap",
        "min_num_params",
        "cpu_ram_efficient_loading",
        "state_dict_type",
    )
)
_RESHARD, _RECOMPUTE = f"{_FSDP}reshard_after_forward", f"{_FSDP}activation_checkpointing"
_LIGER = f"{ARGUMENTS}:use_liger_kernel"
_PLAIN_RECOMPUTE = f"{ARGUMENTS}:activation_checkpointing"
_SYNC_EACH = f"{ARGUMENTS}:accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
_BATCH, _ACCUMULATION = f"{ARGUMENTS}:per_device_train_batch_size", f"{ARGUMENTS}:gradient_accumulation_steps"


# ---- layout ----


def _engine(layout: Layout) -> Literal["NO", "MULTI_GPU", "FSDP"]:
    """The engine to use. FSDP shards over ``dp_shard`` and ``cp`` together, and fails if both are 1."""
    if layout.dp_shard > 1 or layout.cp > 1:
        return "FSDP"
    return "MULTI_GPU" if layout.dp_replicate > 1 else "NO"


def _write_layout(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    engine = _engine(layout)
    builder.settings |= {
        TYPE: engine,
        NUM_PROCESSES: layout.dp * layout.cp * (layout.tp if engine == "FSDP" else 1),
    }
    if engine == "FSDP":
        _write_fsdp(builder, layout)
    elif layout.tp > 1:
        builder.refuse("layout.tp", "Accelerate's launcher supports tp only if dp_shard or cp is above 1")
    _note_engine(builder, layout, engine)


def _write_fsdp(builder: SettingsBuilder, layout: Layout) -> None:
    for name, size in SIZES.items():
        builder.settings[size] = getattr(layout, name)
    if layout.cp > 1:
        builder.settings[_CP_STRATEGY] = "allgather"
    model = builder.workload.model
    is_llama = isinstance(model, LlamaModel)
    shared: dict[str, Any] = {
        "reshard_after_forward": layout.zero_stage == 3,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if is_llama else "SIZE_BASED_WRAP",
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    shared |= {} if is_llama else {"min_num_params": 1_000_000}
    builder.settings |= {f"{_FSDP}{name}": value for name, value in {"version": 2, **shared}.items()}
    builder.settings |= {f"{_MIRROR}{name}": value for name, value in {"version": 2, **shared}.items()}
    builder.settings[f"{ARGUMENTS}:fsdp"] = True
    builder.settings[_SYNC_EACH] = layout.gradient_reduction == "each"
    if isinstance(model, LlamaModel):
        builder.settings[f"{_FSDP}transformer_layer_cls_to_wrap"] = layer_class(model)
        builder.settings[f"{_MIRROR}transformer_layer_cls_to_wrap"] = [layer_class(model)]


def _note_engine(builder: SettingsBuilder, layout: Layout, engine: str) -> None:
    """Add a warning if Accelerate's engine only approximates the configuration."""
    if engine == "FSDP" and layout.tp > 1:
        builder.warn("layout.tp", f"your script must load the model split over {layout.tp} ranks: tp_plan='auto'")
    if engine == "FSDP" and layout.dp_replicate > 1 and layout.dp_shard == 1:
        builder.refuse("layout.dp_replicate", "with cp or tp, Accelerate supports replicas only if dp_shard is above 1")
    if layout.zero_stage == 1:
        builder.warn("layout.zero_stage", "FSDP2 has no stage 1; exported as stage 2, which computes the same result")
    if engine == "FSDP" and layout.dp_shard == 1:
        builder.warn("layout.zero_stage", "FSDP shards the weights over the cp ranks; the measurement replicated them")
    if layout.replicate_with != _replicates_with(layout):
        name = "FSDP2" if engine == "FSDP" else "DDP"
        builder.warn("layout.replicate_with", f"replicas without sharding use {name}")


def _replicates_with(layout: Layout) -> str:
    """Accelerate's engine for plain replicas; in canonical form if there is no choice."""
    return "fsdp2" if layout.zero_stage == 0 and layout.cp > 1 else "ddp"


def _read_layout(settings: Settings) -> dict[str, Any]:
    if settings[TYPE] != "FSDP":
        sizes = {"dp_replicate": settings[NUM_PROCESSES], "dp_shard": 1, "cp": 1, "tp": 1}
    else:
        sizes = {name: settings[size] for name, size in SIZES.items()}
    stage: Literal[0, 2, 3] = 0 if sizes["dp_shard"] == 1 else 3 if settings[_RESHARD] else 2
    layout = Layout(**sizes, zero_stage=stage)
    configured = {"zero_stage": stage, "replicate_with": _replicates_with(layout), "cp_method": "all_gather"}
    configured["gradient_reduction"] = "each" if stage < 2 or settings[_SYNC_EACH] else "last"
    return {f"layout.{name}": value for name, value in {**sizes, **configured}.items()}


# ---- batch, recompute ----


def _write_batch(builder: SettingsBuilder) -> None:
    builder.settings |= {
        _BATCH: builder.candidate.micro_batch_size,
        _ACCUMULATION: builder.candidate.num_microbatches(builder.workload.global_batch_size),
    }


def _read_batch(settings: Settings) -> dict[str, Any]:
    layout = _read_layout(settings)
    dp = layout["layout.dp_replicate"] * layout["layout.dp_shard"]
    return {
        "micro_batch_size": settings[_BATCH],
        "workload.global_batch_size": settings[_BATCH] * settings[_ACCUMULATION] * dp,
    }


def _write_recompute(builder: SettingsBuilder) -> None:
    num_layers = sum(map(sum, builder.candidate.recompute.full))
    is_fsdp = builder.settings[TYPE] == "FSDP"
    builder.settings[_PLAIN_RECOMPUTE] = num_layers > 0 and not is_fsdp
    if is_fsdp:
        builder.settings |= {_RECOMPUTE: num_layers > 0, f"{_MIRROR}activation_checkpointing": num_layers > 0}
    if num_layers and builder.candidate.recompute.full != ((builder.workload.num_layers,),):
        builder.warn(
            "recompute.full", f"only all layers or none are supported: exported as all, instead of {num_layers}"
        )
    elif num_layers and not isinstance(builder.workload.model, LlamaModel):
        builder.warn(
            "recompute.full", "your model must implement activation_checkpointing_enable(), as transformers models do"
        )


def _read_recompute(settings: Settings) -> dict[str, Any]:
    number = num_layers(settings)
    is_on = settings[_PLAIN_RECOMPUTE] or settings.get(_RECOMPUTE, False)
    return {"recompute.full": ((number,),) if is_on and number else ()}


_LAYOUT: tuple[Setting, ...] = (
    fixed(f"{FILE}:compute_environment", "LOCAL_MACHINE"),
    fixed(f"{FILE}:main_training_function", "main"),
    custom(
        (
            *(f"layout.{name}" for name in SIZES),
            *("layout.zero_stage", "layout.replicate_with", "layout.gradient_reduction"),
        ),
        (TYPE, NUM_PROCESSES, *SIZES.values(), _CP_STRATEGY, f"{ARGUMENTS}:fsdp", _SYNC_EACH, *_WRAP),
        _write_layout,
        _read_layout,
    ),
    unable(
        "layout.cp_method",
        "layout.ulysses_degree",
        message="keys and values are gathered; Ulysses requires the DeepSpeed engine, see the format deepspeed",
    ),
    no_pipeline("Accelerate supports pipelines only through Megatron-LM"),
    lacking("layout.tp_engine", "tensor parallelism uses DTensor"),
    unable("layout.sequence_parallel", message=WHOLE_BETWEEN),
    unable("layout.shard_embedding", message="embedding and head belong to the root FSDP unit, which stays gathered"),
    lacking("layout.num_copies", "micro-batches are not split to overlap collectives"),
    custom(("micro_batch_size", "workload.global_batch_size"), (_BATCH, _ACCUMULATION), _write_batch, _read_batch),
    custom(
        ("recompute.full",),
        (_PLAIN_RECOMPUTE, _RECOMPUTE, f"{_MIRROR}activation_checkpointing"),
        _write_recompute,
        _read_recompute,
    ),
    unable("recompute.selective", "recompute.communication", message="Accelerate recomputes full layers only"),
)


_MIXED_PRECISION = f"{FILE}:mixed_precision"
_OFFLOAD = f"{FILE}:fsdp_config.fsdp_activation_checkpointing_offload"
_DYNAMO = f"{FILE}:dynamo_config.dynamo_"
_BACKEND, _MODE, _REGIONAL = f"{_DYNAMO}backend", f"{_DYNAMO}mode", f"{_DYNAMO}use_regional_compilation"
_COMPILE = f"{ARGUMENTS}:torch_compile"
_TF32, _DECAY = f"{ARGUMENTS}:tf32", f"{ARGUMENTS}:weight_decay"
DYNAMO_BACKENDS = ("inductor", "eager", "aot_eager", "cudagraphs", "tvm", "tensorrt")
"""Values of ``DynamoBackend`` that torch.compile knows by the same name."""
_POLICY = "FSDP gathers weights and reduces gradients in 16 bits unless your script sets plugin.mixed_precision_policy"
_SHORT = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


# ---- precision ----


def _write_precision(builder: SettingsBuilder) -> None:
    refuse_fp8(builder, "mixed_precision fp8 with backend AO skips the first linear module, or uses other recipes")
    precision, is_fsdp = builder.candidate.precision, builder.settings[TYPE] == "FSDP"
    builder.settings |= {
        _MIXED_PRECISION: _SHORT[precision.dtype],
        f"{ARGUMENTS}:bf16": precision.dtype == "bfloat16",
        f"{ARGUMENTS}:fp16": precision.dtype == "float16",
    }
    if is_fsdp and precision.base == "O1":
        builder.warn("precision.level", f"{_POLICY}; pass MixedPrecisionPolicy() for autocast alone")
    elif is_fsdp and precision.base == "O2":
        builder.warn("precision.level", f"{_POLICY}; pass MixedPrecisionPolicy(..., reduce_dtype=torch.float32)")
    elif precision.base == "O2":
        builder.refuse(
            "precision.level",
            "without FSDP, only autocast (O1) is available, not 16-bit weights with fp32 master weights",
        )
    if precision.loss_scale is not None and not takes_torch_scaler(builder):
        builder.warn(
            "precision.loss_scale",
            "the Trainer uses the defaults of torch's GradScaler (2^16, doubled after 2000 steps, halved at the "
            "first overflow); in a custom script pass GradScalerKwargs(init_scale=..., growth_interval=...)",
        )


def _read_precision(settings: Settings) -> dict[str, Any]:
    dtype = next(dtype for dtype, short in _SHORT.items() if short == settings[_MIXED_PRECISION])
    level = "O0" if dtype == "float32" else "O2" if settings[TYPE] == "FSDP" else "O1"
    return {"precision.level": level, "precision.dtype": dtype, **(TORCH_SCALER if dtype == "float16" else {})}


# ---- kernels ----


def _write_compile(builder: SettingsBuilder) -> None:
    kernels = builder.candidate.kernels
    if kernels.compile == "off":
        builder.settings[_BACKEND] = "NO"
        builder.settings[_COMPILE] = False
        return
    backend = kernels.backend
    if backend not in DYNAMO_BACKENDS:
        builder.refuse("kernels.backend", f"Accelerate does not support the backend {backend}; exported as inductor")
        backend = "inductor"
    builder.settings |= {
        _BACKEND: backend.upper(),
        _MODE: kernels.compile_mode,
        _REGIONAL: kernels.compile == "block",
        _COMPILE: True,
        f"{_COMPILE}_backend": backend,
        f"{_COMPILE}_mode": kernels.compile_mode,
    }


def _read_compile(settings: Settings) -> dict[str, Any]:
    if settings[_BACKEND] == "NO":
        return {"kernels.compile": "off"}
    return {
        "kernels.compile": "block" if settings[_REGIONAL] else "model",
        "kernels.backend": settings[_BACKEND].lower(),
        "kernels.compile_mode": settings[_MODE],
    }


def _write_fused(builder: SettingsBuilder) -> None:
    if builder.candidate.kernels.fused == "liger":
        builder.settings[_LIGER] = True
    elif builder.candidate.kernels.fused == "torch":
        builder.warn("kernels.fused", "your script must replace the model's norms by torch.nn.functional.rms_norm")


def _read_fused(settings: Settings) -> dict[str, Any]:
    return {"kernels.fused": "liger" if _LIGER in settings else "auto"}


def _write_matmul(builder: SettingsBuilder) -> None:
    """Always write TF32: the Trainer enables it itself when it compiles."""
    requested = builder.candidate.kernels.matmul_precision
    builder.settings[_TF32] = requested != "highest"
    if requested == "medium":
        builder.warn("kernels.matmul_precision", "bfloat16 inside fp32 matrix products cannot be set; _TF32 is (high)")


def _read_matmul(settings: Settings) -> dict[str, Any]:
    return {"kernels.matmul_precision": "high" if settings[_TF32] else "highest"}


# ---- optimiser ----


def _write_seed(builder: SettingsBuilder) -> None:
    builder.settings |= {f"{ARGUMENTS}:seed": builder.workload.seed, f"{ARGUMENTS}:data_seed": builder.workload.seed}


def _write_decay(builder: SettingsBuilder) -> None:
    builder.settings[_DECAY] = builder.workload.optimizer.weight_decay
    if builder.settings[_DECAY]:
        builder.warn(
            "workload.optimizer.weight_decay", "the Trainer applies no weight decay to norms, the built-in runner does"
        )


_OPTIMIZER = "workload.optimizer"
_RUN: tuple[Setting, ...] = (
    custom(
        ("precision.level", "precision.dtype", "precision.loss_scale"),
        (_MIXED_PRECISION, f"{ARGUMENTS}:bf16", f"{ARGUMENTS}:fp16"),
        _write_precision,
        _read_precision,
    ),
    unable("precision.white", "precision.black", message="autocast's lists of operators cannot be changed"),
    NO_FP32_MODULES,
    option("loader.num_workers", f"{ARGUMENTS}:dataloader_num_workers"),
    option(
        "loader.prefetch_factor",
        f"{ARGUMENTS}:dataloader_prefetch_factor",
        to=lambda batches: batches or None,
        of=lambda batches: batches or 0,
    ),
    option("loader.pin_memory", f"{ARGUMENTS}:dataloader_pin_memory"),
    option("loader.persistent_workers", f"{ARGUMENTS}:dataloader_persistent_workers"),
    lacking("loader.full_batch", "every rank reads only its own rows"),
    left_to_script("loader.tuning", "the loader is not tuned automatically: set the values from the report"),
    custom(
        ("kernels.compile", "kernels.backend", "kernels.compile_mode"),
        (_BACKEND, _MODE, _REGIONAL, _COMPILE, f"{_COMPILE}_backend", f"{_COMPILE}_mode"),
        _write_compile,
        _read_compile,
    ),
    custom(("kernels.matmul_precision",), (_TF32,), _write_matmul, _read_matmul),
    *KERNELS_OF_SCRIPT,
    custom(("kernels.fused",), (_LIGER,), _write_fused, _read_fused),
    *VARYING_LENGTHS,
    *memory_savers(
        activations=offloads_inputs(_OFFLOAD, applies=lambda settings: settings[TYPE] == "FSDP"),
        optimizer="fsdp_offload_params moves weights and gradients too, and gathers weights from the host",
    ),
    option(f"{_OPTIMIZER}.lr", f"{ARGUMENTS}:learning_rate"),
    option(f"{_OPTIMIZER}.beta1", f"{ARGUMENTS}:adam_beta1"),
    option(f"{_OPTIMIZER}.beta2", f"{ARGUMENTS}:adam_beta2"),
    option(f"{_OPTIMIZER}.eps", f"{ARGUMENTS}:adam_epsilon"),
    custom(
        (f"{_OPTIMIZER}.weight_decay",),
        (_DECAY,),
        _write_decay,
        lambda settings: {f"{_OPTIMIZER}.weight_decay": settings[_DECAY]},
    ),
    custom(
        ("workload.seed",),
        (f"{ARGUMENTS}:seed", f"{ARGUMENTS}:data_seed"),
        _write_seed,
        lambda settings: {"workload.seed": settings[f"{ARGUMENTS}:seed"]},
    ),
    fixed(f"{ARGUMENTS}:optim", "adamw_torch"),
    fixed(f"{ARGUMENTS}:lr_scheduler_type", "constant"),
    option(f"{_OPTIMIZER}.clip_norm", f"{ARGUMENTS}:max_grad_norm", of=float),
    fixed(f"{ARGUMENTS}:dataloader_drop_last", True),
    fixed(f"{ARGUMENTS}:output_dir", "output"),
    own_data("the data are read by your script"),
)


def _render(builder: SettingsBuilder) -> dict[str, str]:
    head = "".join(f"{line}\n" for line in comments(builder.notes))
    return {
        FILE: head + yaml.safe_dump(tree(builder.settings, FILE), sort_keys=False),
        ARGUMENTS: json.dumps(tree(builder.settings, ARGUMENTS), indent=2) + "\n",
        **model_files(builder),
    }


def _load(files: Mapping[str, str]) -> dict[str, Any]:
    launcher, arguments = yaml.safe_load(files[FILE]), json.loads(files[ARGUMENTS])
    return {**settings_of(FILE, launcher), **settings_of(ARGUMENTS, arguments), **model_settings(files)}


RECIPE = Recipe(
    name="accelerate",
    title="Accelerate",
    settings=(*_LAYOUT, *_RUN, *MODEL_SETTINGS),
    render=_render,
    load=_load,
    command=lambda _: f"accelerate launch --config_file {FILE} train.py {ARGUMENTS}",
)


_MICRO_BATCH = (
    "per_device_train_batch_size",
    "micro_batch_size",
    "train_micro_batch_size",
    "train_batch_size",
    "per_gpu_train_batch_size",
    "batch_size",
    "batch",
    "bs",
)
"""Argument names for the samples of a rank's forward pass, most reliable first."""
_ACCUMULATION_ARGUMENTS = (
    "gradient_accumulation_steps",
    "accumulation_steps",
    "grad_accum_steps",
    "accumulation",
    "grad_accum",
    "accum",
)


@functools.lru_cache(maxsize=8)
def declared(text: str) -> Mapping[str, tuple[str, Any]]:
    """Every ``add_argument`` of a Python text, by its name with underscores: its spelling and its default, None if that
    is not a constant."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return MappingProxyType({})
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return MappingProxyType(dict(found for call in calls for found in _declarations(call)))


def _declarations(call: ast.Call) -> Iterator[tuple[str, tuple[str, Any]]]:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
        return
    defaults = [word.value for word in call.keywords if word.arg == "default"]
    default = defaults[0].value if defaults and isinstance(defaults[0], ast.Constant) else None
    for word in call.args:
        if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value.startswith("--"):
            yield word.value.lstrip("-").replace("-", "_"), (word.value, default)


def named(words: Words, text: str, names: Iterable[str]) -> tuple[Argument, Any] | None:
    """The first of these arguments that is in the command, or that the script declares, with its default."""
    known = declared(text)
    given = next((name for name in names if is_specified(words, either_dash(f"--{name}"))), None)
    name = given or next((name for name in names if name in known), None)
    if name is None:
        return None
    spelled, default = known.get(name, (f"--{name}", None))
    return either_dash(spelled), default


_NAMES: Mapping[str, Words] = {
    "batch": _MICRO_BATCH,
    "accumulation": _ACCUMULATION_ARGUMENTS,
    "workers": ("dataloader_num_workers", "num_workers", "workers"),
    "precision": ("mixed_precision",),
    "seed": ("seed",),
}
_FOLDERS = {"output_dir": OUT, "project_dir": OUT, "logging_dir": OUT}
"""Arguments in the examples of Accelerate and transformers that name a folder."""
_OFF = ("with_tracking", "push_to_hub", "report_to", "checkpointing_steps", "resume_from_checkpoint")
"""Arguments of these examples that trials omit."""


class ScriptArguments:
    """Settings of a command being edited: arguments by purpose, and those of the engine."""

    def __init__(self, edit: Edit) -> None:
        self.engine = ShardingEngine(edit, None)
        self._edit = edit
        self._head = program_of(edit.argv).head
        self._text = script_text(edit.argv, edit.cwd) if edit.cwd else ""
        found = ((role, named(self.words, self._text, names)) for role, names in _NAMES.items())
        self._found = {role: argument for role, argument in found if argument}

    @property
    def words(self) -> Words:
        return self._edit.argv[len(self._head) :]

    @property
    def accumulates(self) -> bool:
        """Whether Accelerate accumulates gradients for the script."""
        return ".accumulate(" in self._text

    @property
    def decides_precision(self) -> bool:
        """Whether the script sets the precision to a constant, which overrides the variable."""
        return re.search(r"Accelerator\([^)]*mixed_precision\s*=\s*[\"']", self._text) is not None

    def has(self, role: str) -> bool:
        return role in self._found

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an argument, or its default; ``default`` without either."""
        if is_of_engine(name):
            return self.engine.get(name, default)
        if name not in self._found:
            return default
        argument, usual = self._found[name]
        given = read_text(self.words, argument)
        found = usual if given is None else given
        return default if found is None else str(found)

    def put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if is_of_engine(name):
                self.engine.put(name, value)
            else:
                self.put_argument(self._found[name][0], str(value))

    def drop(self, *names: str) -> None:
        for name in names:
            self._drop(self._found[name][0])

    def quiet(self) -> None:
        """Redirect folders into the trial's own, and omit trackers, checkpoints and the hub."""
        for name, value in _FOLDERS.items():
            if is_specified(self.words, either_dash(f"--{name}")):
                self.put_argument(either_dash(f"--{name}"), value)
        for name in _OFF:
            kind: Literal["flag", "value"] = "flag" if name in ("with_tracking", "push_to_hub") else "value"
            self._drop(either_dash(f"--{name}", kind))

    def put_argument(self, argument: Argument, text: str) -> None:
        self._edit.argv = (*self._head, *write(self.words, argument, text))

    def _drop(self, argument: Argument) -> None:
        self._edit.argv = (*self._head, *remove(self.words, argument))


def _recognises(run: Run) -> bool:
    text = script_text(run.argv, run.cwd)
    if "accelerate" in imports(text):
        return "Accelerator(" in text
    return without_launcher(run.argv).launcher == "accelerate"


# ---- rows of programs ----


def _script(builder: SettingsBuilder) -> ScriptArguments:
    return cast(ScriptArguments, builder.command)


def _write_program_batch(builder: SettingsBuilder) -> None:
    """The batch size, from the script's argument; accumulation, from its argument or from the variable that overrides
    the value in the script."""
    words, steps = _script(builder), num_microbatches(builder)
    if builder.changed("micro_batch_size") and words.has("batch"):
        builder.settings["batch"] = builder.candidate.micro_batch_size
    elif builder.changed("micro_batch_size"):
        advice = "put {micro_batch_size} at the batch size in your command"
        builder.refuse("micro_batch_size", f"no known argument of the script sets it: {advice}")
    if words.has("accumulation"):
        builder.settings["accumulation"] = steps
    if words.get(_STEPS) is not None if words.has("accumulation") else words.accumulates:
        builder.settings[_STEPS] = str(steps)


def _read_program_batch(found: Found) -> dict[str, Any]:
    variable = str(found.get(_STEPS))
    steps = found.whole("micro_batch_size", "accumulation")
    found.num_microbatches = int(variable) if variable.isdigit() else steps
    return {"micro_batch_size": found.whole("micro_batch_size", "batch")}


def _write_role(path: str, role: str) -> Callable[[SettingsBuilder], None]:
    def write(builder: SettingsBuilder) -> None:
        if _script(builder).has(role):
            builder.settings[role] = builder.values[path]

    return write


def _role(path: str, role: str) -> Setting:
    """A whole number from the script's argument, if it has one."""
    return row(path, role, _write_role(path, role), lambda found: {path: found.whole(path, role)})


def _write_program_precision(builder: SettingsBuilder) -> None:
    words, short = _script(builder), _SHORT[builder.candidate.precision.dtype]
    if words.get("precision") is not None:
        builder.settings["precision"] = short
    elif words.decides_precision:
        builder.refuse("precision", "the script sets Accelerator(mixed_precision=...)")
    else:
        builder.settings[_PRECISION] = short
    write_precision_of_engine(builder)


def _read_program_precision(found: Found) -> dict[str, Any]:
    short = found.get("precision") or found.get(_PRECISION)
    if short is None and cast(ScriptArguments, found.command).decides_precision:
        return {}
    return read_precision(found, short or "no")


def _write_program_recompute(builder: SettingsBuilder) -> None:
    if builder.current(ENGINE) == "fsdp":
        builder.settings["fsdp:activation_checkpointing"] = bool(builder.candidate.recompute.full)
    else:
        builder.refuse("recompute.full", "without FSDP the script itself must recompute its layers")


def _read_program_recompute(found: Found) -> dict[str, Any]:
    return full_recompute(found, fsdp_recomputes(found)) if found.get(ENGINE) == "fsdp" else {}


_STEPS, _PRECISION = f"env:{ACCUMULATION}", f"env:{MIXED_PRECISION}"
_ROWS = (
    row(
        ("micro_batch_size", "workload.global_batch_size"),
        ("batch", "accumulation", _STEPS),
        _write_program_batch,
        _read_program_batch,
    ),
    _role("loader.num_workers", "workers"),
    LAYOUT,
    row(
        ("precision.level", "precision.dtype"),
        ("precision", _PRECISION),
        _write_program_precision,
        _read_program_precision,
    ),
    row("recompute.full", "fsdp:activation_checkpointing", _write_program_recompute, _read_program_recompute),
    _role("workload.seed", "seed"),
    TOTAL,
)


def _check(edit: Edit, request: OverlayRequest) -> None:
    """Write custom knobs, and note what neither Accelerate nor the script supports."""
    words, steps = ScriptArguments(edit), request.num_microbatches
    for choice in request.candidate.own:
        words.put_argument(either_dash(f"--{choice.name}"), str(choice.value))
    is_same = steps in (1, request.reading.num_microbatches) or "{accumulation}" in " ".join(edit.argv)
    if not (words.has("accumulation") or words.accumulates or is_same):
        message = (
            f"the script does not accumulate, but {steps} micro-batches are required: accelerator.accumulate(model)"
        )
        edit.refuse("micro_batch_size", message)
    check_engine(words.engine, request)


TABLE = FrameworkTable(
    rows=_ROWS,
    command=ScriptArguments,
    defaults={},
    model=lambda edit, found: None,  # noqa: ARG005
    check=_check,
    open=opened,
    approximated=APPROXIMATED,
)


def _trial_mode(overlay: Overlay, last_step: int) -> Overlay:  # noqa: ARG001 - the rank ends it
    """Turn trackers off. The script controls saves and evaluation, but their output goes into the trial's folder."""
    edit = edit_of(overlay)
    ScriptArguments(edit).quiet()
    return trackers_off(edit)


TRAINING = Training(
    name="accelerate",
    title="Accelerate",
    package="accelerate",
    releases=">=1.0,<2",
    takes_launchers=True,
    takes_custom_names=True,
    log=LogFormat(name="accelerate"),
    recognises=_recognises,
    find_files=find_launch_files,
    read=TABLE.read,
    overlay=TABLE.overlay,
    trial_mode=_trial_mode,
    expected=expected_of,
)
