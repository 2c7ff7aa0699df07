"""Settings of a torchtitan command of the user's own: arguments like ``--training.steps``, which count more than what
the configuration function says, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.recipes import arguments
from orchestrator.recipes.arguments import Argument, Words, either_dash
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.overlays.findings import ReadingDraft
from orchestrator.recipes.torchtitan.config_text import (
    ACTIVATION_CHECKPOINT,
    ELSEWHERE,
    MODEL,
    UNKNOWN,
    base_of,
    find,
    settings_of,
)

MODULE, FUNCTION = Argument(name="--module"), Argument(name="--config")
OLD = either_dash("--job.config_file", aliases=("--job.config-file",))
CONFIG = "titan_config"
"""Name of the configuration function's file among a run's files."""
BASE = "titan_base"
"""Name of the file whose functions it starts from."""
PARTS = "parallelism.module_fqns_per_model_part"
DEFAULTS: Mapping[str, Any] = {
    "training.local_batch_size": 8,
    "training.global_batch_size": -1,
    "training.seq_len": 2048,
    "training.steps": 10000,
    "training.dtype": "float32",
    "training.mixed_precision_param": "bfloat16",
    "training.disable_cuda_graphs": False,
    "training.enable_cpu_offload": False,
    "lr_scheduler.total_steps": None,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.enable_sequence_parallel": True,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.pipeline_parallel_microbatch_size": 1,
    PARTS: None,
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "compile.enable": False,
    "compile.components": ["model", "loss"],
    "compile.backend": "inductor",
    "dataloader.num_workers": 0,
    "dataloader.prefetch_factor": None,
    "dataloader.pin_memory": False,
    "dataloader.persistent_workers": False,
    "debug.seed": None,
    ACTIVATION_CHECKPOINT: "selective",
    MODEL: UNKNOWN,
}
"""Defaults of release 0.3.0, for what is read here."""
_FLAGS = (
    *(name for name, value in DEFAULTS.items() if isinstance(value, bool)),
    "checkpoint.enable",
    "validator.enable",
    "metrics.enable_tensorboard",
    "metrics.enable_wandb",
    "metrics.disable_color_printing",
    "metrics.save_for_all_ranks",
    "profiler.enable_profiling",
    "profiler.enable_memory_snapshot",
    "debug.enable_structured_logging",
)


def argument(name: str) -> Argument:
    """How a setting is spelled as an argument; a truth value has a name of its own for no."""
    if name not in _FLAGS:
        return either_dash(f"--{name}", "list" if name == PARTS else "value")
    section, _, key = name.rpartition(".")
    return either_dash(f"--{name}", "flag", negative=(f"--{section}.no_{key}",))


class TitanArguments:
    """Settings of an edit by name."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        function = arguments.read_text(edit.argv, FUNCTION)
        text = edit.files.get(CONFIG)
        base = edit.files.get(BASE, "")
        self.config = settings_of(text, function, base) if text is not None and function else None
        """What the configuration function says; None where it could not be read."""

    @property
    def _at(self) -> int:
        """Where tyro's subcommand begins, behind which options belong to it."""
        found = (index for index, word in enumerate(self._edit.argv) if _is_policy(word))
        return next(found, len(self._edit.argv))

    @property
    def options(self) -> Words:
        return self._edit.argv[: self._at]

    def get(self, name: str) -> Any:
        """The value that counts; :data:`UNKNOWN` where the function computes it, or could not be read."""
        if name == ACTIVATION_CHECKPOINT and self._at < len(self._edit.argv):
            return self._edit.argv[self._at].partition(":")[2]
        said = arguments.read(self.options, argument(name)) if name not in (ACTIVATION_CHECKPOINT, MODEL) else None
        if said is not None:
            return said
        if self.config is None:
            return UNKNOWN
        return self.config.get(name, UNKNOWN if ELSEWHERE in self.config else DEFAULTS[name])

    def whole(self, found: ReadingDraft, knob: str, name: str) -> int | None:
        """A whole number; None where it is not known."""
        value = self.get(name)
        return None if value in (UNKNOWN, None) else found.whole(knob, f"--{name}", value)

    def put(self, name: str, value: Any) -> None:
        given = tuple(value) if name == PARTS else value if isinstance(value, bool) else str(value)
        head = arguments.write(self.options, argument(name), given)
        self._edit.argv = (*head, *self._edit.argv[self._at :])

    def put_policy(self, policy: str) -> None:
        """Name the policy of activation checkpointing; options of another one go with it."""
        if self._at == len(self._edit.argv) or self.get(ACTIVATION_CHECKPOINT) != policy:
            self._edit.argv = (*self.options, f"activation-checkpoint:{policy}")


def _is_policy(word: str) -> bool:
    return word.replace("_", "-").startswith("activation-checkpoint:")


def find_files(argv: Words, cwd: str) -> Mapping[str, str]:
    """The file of the configuration function, where it can be found."""
    module = arguments.read_text(argv, MODULE)
    python = argv[0] if argv else "python"
    path = find(module, cwd, python) if module and "{" not in module else None
    base = base_of(path, cwd, python) if path else None
    return {name: found for name, found in ((CONFIG, path), (BASE, base)) if found}
