"""What makes the ranks of a program on Accelerate one training: DDP, DeepSpeed or FSDP, told by arguments or by the
variables of ``accelerate launch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from orchestrator.recipes.arguments import as_truth
from orchestrator.recipes.documents import ABSENT
from orchestrator.recipes.hugging_face.settings import FSDP, FileSection, TrainerArguments
from orchestrator.recipes.overlays.edit import Edit, EditedFile

MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
USE_DEEPSPEED, USE_FSDP = "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
DEEPSPEED_FILE, DEEPSPEED_STAGE = "ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_ZERO_STAGE"
MADE = "deepspeed_made"
"""Placeholder of a DeepSpeed configuration that the command did not have."""
_PRESETS = {f"zero{stage}{offload}": stage for stage in range(4) for offload in ("", "_offload")}
_NEW: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
"""A DeepSpeed configuration that leaves everything but ZeRO to the Trainer's arguments."""


class ShardingEngine:
    """The engine of a command in the making; ``arguments`` are the Trainer's, if the program has them."""

    def __init__(self, edit: Edit, arguments: TrainerArguments | None) -> None:
        self.edit = edit
        self._arguments = arguments

    def variable(self, name: str) -> str | None:
        return self.edit.env.get(name, self.edit.given_env.get(name))

    def is_set(self, name: str) -> bool:
        return as_truth(self.variable(name)) is True

    # ---- which it is ----

    @property
    def by_arguments(self) -> Literal["deepspeed", "fsdp"] | None:
        """The engine that the Trainer's arguments ask for."""
        if self._arguments is None:
            return None
        if self._is_given("deepspeed"):
            return "deepspeed"
        return "fsdp" if self._is_given("fsdp") else None

    @property
    def kind(self) -> Literal["ddp", "deepspeed", "fsdp"]:
        if (asked := self.by_arguments) is not None:
            return asked
        if self.is_set(USE_DEEPSPEED):
            return "deepspeed"
        return "fsdp" if self.is_set(USE_FSDP) else "ddp"

    @property
    def is_on_cpu(self) -> bool:
        """Whether the command asks for the CPU."""
        asked = self._arguments is not None and (self._arguments.is_on("use_cpu") or self._arguments.is_on("no_cuda"))
        return asked or self.is_set("ACCELERATE_USE_CPU")

    def _is_given(self, name: str) -> bool:
        assert self._arguments is not None
        given = self._arguments.given(name)
        if name == "fsdp" and given == "":
            return True  # --fsdp without a value
        return given not in (ABSENT, None, "", "None", "null", "no", [], {}) and as_truth(_plain(given)) is not False

    # ---- DeepSpeed ----

    @property
    def config(self) -> FileSection | None:
        """DeepSpeed's configuration; None where there is none that can be read."""
        if self.by_arguments == "deepspeed" and self._arguments is not None:
            return self._arguments.section("deepspeed")
        placed = (self.variable(DEEPSPEED_FILE) or "").strip("{}")
        return FileSection(EditedFile(self.edit, placed)) if placed in self.edit.files else None

    @property
    def preset(self) -> int | None:
        """The stage of a configuration that ms-swift has a name for."""
        if self._arguments is None or not self._arguments.dialect.presets:
            return None
        return _PRESETS.get(str(self._arguments.given("deepspeed")))

    @property
    def stage(self) -> int | None:
        """ZeRO's stage under DeepSpeed or FSDP; 0 under DDP; None where it cannot be understood."""
        if self.kind == "ddp":
            return 0
        if self.kind == "fsdp":
            return self._fsdp_stage()
        if self.preset is not None:
            return self.preset
        given: Any = self.variable(DEEPSPEED_STAGE) or 2
        if self.config is not None:
            given = self.config.get("zero_optimization.stage", 0)
        elif self.by_arguments == "deepspeed" or self.variable(DEEPSPEED_FILE) not in (None, "none"):
            return None
        return int(given) if str(given) in ("0", "1", "2", "3") else None

    def put_config(self, changes: Mapping[str, Any]) -> None:
        """Change keys of DeepSpeed's configuration, which is made where there is none."""
        is_by_variables = self._arguments is None or (self.kind == "deepspeed" and self.by_arguments is None)
        if is_by_variables:
            self.edit.env[USE_DEEPSPEED] = "true"
        elif self.kind != "deepspeed" and self._arguments is not None:
            self._arguments.make_section("deepspeed", _NEW, MADE)
        if self.config is not None:
            self.config.put(changes)
        elif is_by_variables and "zero_optimization.stage" in changes:
            self.edit.env[DEEPSPEED_STAGE] = str(changes["zero_optimization.stage"])

    def put_preset(self, stage: int) -> None:
        """Name ms-swift's configuration for a stage, with offloading where the one before had it."""
        assert self._arguments is not None
        offload = "_offload" if str(self._arguments.given("deepspeed")).endswith("_offload") and stage > 1 else ""
        self._arguments.put("deepspeed", f"zero{stage}{offload}")

    # ---- FSDP ----

    def fsdp(self, key: str) -> Any:
        """A setting of FSDP by its name without ``fsdp_``; None where it is not given."""
        if self.by_arguments != "fsdp" or self._arguments is None:
            return self.variable(f"FSDP_{key.upper()}")
        section = self._arguments.section(FSDP)
        return None if section is None else section.get(key, section.get(f"fsdp_{key}"))

    def put_fsdp(self, key: str, value: Any) -> None:
        """Change a setting of FSDP where it is given, or add it."""
        if self.by_arguments != "fsdp" or self._arguments is None:
            self.edit.env[f"FSDP_{key.upper()}"] = str(value).lower()
            return
        if (section := self._arguments.section(FSDP)) is None:
            self._arguments.make_section(FSDP, {key: value}, FSDP)
        else:
            section.put({f"fsdp_{key}" if section.has(f"fsdp_{key}") else key: value})

    def _fsdp_stage(self) -> int | None:
        """3 where weights are given back after the forward pass, else 2."""
        words = str(self._arguments.given("fsdp")) if self.by_arguments and self._arguments is not None else ""
        if "shard_grad_op" in words:
            return 2
        if "hybrid" in words or "no_shard" in words:
            return None
        given = (self.fsdp("reshard_after_forward"), self.fsdp("sharding_strategy"), True)
        said = str(next(value for value in given if value not in (None, "None"))).lower()
        stages = {"true": 3, "1": 3, "full_shard": 3, "false": 2, "0": 2, "shard_grad_op": 2}
        return stages.get(said)

    def leave(self) -> None:
        """Turn off DeepSpeed or FSDP, which leaves DDP."""
        if self._arguments is not None and self.by_arguments is not None:
            names = ("deepspeed",) if self.by_arguments == "deepspeed" else ("fsdp", FSDP)
            self._arguments.drop(*names)
        for name in (USE_DEEPSPEED, USE_FSDP):
            if self.is_set(name):
                self.edit.env[name] = "false"


def _plain(given: Any) -> Any:
    return given if isinstance(given, bool | str) else None
