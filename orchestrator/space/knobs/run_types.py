"""Types of the knobs on precision, data reading and kernels as they stand in a sweep file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from orchestrator.space.knobs.sections import Section, ShortForms, Word, fault, show
from trials.legality.rules import FP32_MAX, FP32_TINY
from trials.spec import LoaderTuning, LossScale, Precision


def _names(value: Any) -> tuple[str, ...]:
    remedy = "List operators by their names in torch.nn.functional, like [linear, rms_norm]."
    if not isinstance(value, list | tuple):
        raise fault(None, f"expected a list of operator names, got {show(value)}", remedy)
    for i, name in enumerate(value):
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 100:
            raise fault(str(i), f"{show(name)} is not the name of an operator", remedy)
    return tuple(sorted(set(value)))


OperatorNames = Annotated[
    tuple[str, ...],
    BeforeValidator(_names),
    WithJsonSchema({"type": "array", "items": {"type": "string", "pattern": r"^[A-Za-z_]\w*$"}}),
]


class LossScaleSection(Section):
    """Loss scaling for float16."""

    initial: float = Field(default=LossScale().initial, ge=FP32_TINY, le=FP32_MAX, description="Scale at the start.")
    growth_factor: float = Field(
        default=LossScale().growth_factor, gt=1, le=FP32_MAX, description="Growth after enough finite steps."
    )
    growth_interval: int = Field(
        default=LossScale().growth_interval, ge=1, le=2**31 - 1, description="Finite steps in a row before growth."
    )
    backoff_factor: float = Field(
        default=LossScale().backoff_factor, gt=0, lt=1, description="Shrinking after overflow."
    )
    backoff_interval: int = Field(
        default=LossScale().backoff_interval, ge=1, le=2**31 - 1, description="Overflowing steps in a row before it."
    )
    dynamic: bool = Field(default=LossScale().dynamic, description="false keeps `initial` for the whole run.")


class PrecisionSection(Section):
    """Mixed precision, long form."""

    level: Literal["O0", "O1", "O1-fp8", "O2"] = Field(
        description="O0: fp32. O1: autocast. O2: 16-bit parameters with fp32 master weights. O1-fp8: autocast, with "
        "the layers' matmuls in 8-bit floats."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="16-bit type of O1 and O2; left out: bfloat16."
    )
    loss_scale: LossScaleSection | None = Field(
        default=None, description="Loss scaling, float16 only; left out: dynamic from 2^15."
    )
    white: OperatorNames = Field(
        default=(), description="Operators O1 runs in 16 bits, whatever autocast says, like `rms_norm`."
    )
    black: OperatorNames = Field(default=(), description="Operators O1 runs in fp32, whatever autocast says.")

    @model_validator(mode="after")
    def _consistent(self) -> PrecisionSection:
        if self.level == "O0" and self.dtype not in (None, "float32"):
            raise fault("dtype", f"O0 is float32, not {self.dtype}", "Use O1 or O2, or leave dtype out.")
        if self.level != "O0" and self.dtype == "float32":
            raise fault("dtype", f"{self.level} needs a 16-bit type", "Use bfloat16 or float16, or level O0.")
        if self.level == "O1-fp8" and self.dtype == "float16":
            raise fault("dtype", "O1-fp8 goes with bfloat16", "Leave dtype out, or use level O1.")
        if self.loss_scale is not None and self.dtype != "float16":
            raise fault("loss_scale", "loss scaling is for float16 only", "Leave it out or set dtype: float16.")
        if (self.white or self.black) and self.level != "O1":
            raise fault("white" if self.white else "black", f"{self.level} has no lists", "Use O1, or leave them out.")
        if twice := set(self.white) & set(self.black):
            raise fault("black", f"{min(twice)!r} is on the white list too", "Keep it on one of them.")
        return self

    def to_precision(self) -> Precision:
        dtype = self.dtype or ("float32" if self.level == "O0" else "bfloat16")
        scale = self.loss_scale or LossScaleSection()
        loss_scale = LossScale(**scale.model_dump()) if dtype == "float16" else None
        return Precision(level=self.level, dtype=dtype, loss_scale=loss_scale, white=self.white, black=self.black)


class DataloaderSection(Section):
    """Search for the loader's settings before training, by hill climbing."""

    tuning_steps: int = Field(
        default=LoaderTuning().tuning_steps,
        ge=1,
        le=10**6,
        description="Batches read per point tried; a point also ends after 0.4 s.",
    )
    max_workers: int = Field(
        default=LoaderTuning().max_workers, ge=1, le=1024, description="Data-loading processes tried at most."
    )

    def to_tuning(self) -> LoaderTuning:
        return LoaderTuning(**self.model_dump())


class CudnnSection(Section):
    """The steps in which cuDNN measures its algorithms; later ones use what was found."""

    first: int = Field(ge=1, le=10**6, description="First step.")
    last: int = Field(ge=1, le=10**6, description="Last step.")

    @model_validator(mode="after")
    def _ordered(self) -> CudnnSection:
        if self.last < self.first:
            raise fault("last", f"{self.last} is before first {self.first}", "Raise last.")
        return self

    def to_range(self) -> tuple[int, ...]:
        return self.first, self.last


def _write_precision(value: Precision) -> Any:
    written: dict[str, Any] = {"level": value.level, "dtype": value.dtype}
    if value.dtype == "float16":
        scale = value.loss_scale or LossScale()
        written["loss_scale"] = {name: getattr(scale, name) for name in LossScaleSection.model_fields}
    lists = {"white": list(value.white), "black": list(value.black)}
    return written | {name: names for name, names in lists.items() if names}


def _write_tuning(value: LoaderTuning | None) -> Any:
    if value is None:
        return "manual"
    written = {"tuning_steps": value.tuning_steps, "max_workers": value.max_workers}
    return "auto" if value == LoaderTuning() else written


def _write_range(value: tuple[int, ...]) -> Any:
    return {"first": value[0], "last": value[1]} if value else "off"


def off_is_false(value: Any) -> Any:
    """YAML 1.1 reads a bare ``off`` as false; here it can only mean the word."""
    return "off" if value is False else value


LEVELS = ("O0", "O1", "O1-fp8", "O2")
PrecisionValue = Annotated[
    PrecisionSection,
    ShortForms({level: {"level": level} for level in LEVELS}, remedy=f"Write one of {', '.join(LEVELS)}."),
    AfterValidator(PrecisionSection.to_precision),
    PlainSerializer(_write_precision),
]
DataloaderValue = Annotated[
    DataloaderSection,
    ShortForms({"auto": {}}, others=("manual",)),
    AfterValidator(DataloaderSection.to_tuning),
    Word("manual", None),
    PlainSerializer(_write_tuning),
]
CudnnValue = Annotated[
    CudnnSection,
    ShortForms({}, others=("off",)),
    AfterValidator(CudnnSection.to_range),
    Word("off", ()),
    PlainSerializer(_write_range),
]
CompileValue = Annotated[
    Literal["off", "block", "model"],
    BeforeValidator(off_is_false),
    WithJsonSchema({"enum": ["off", "block", "model", False]}),
]
