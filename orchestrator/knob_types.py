"""Types of single knob values as they stand in a sweep file: validation, JSON Schema, and the way back to YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from trials.spec import FullRecompute, LossScale, NoRecompute, Precision, Recompute

EVERY_LAYER = 2**31 - 1
"""Layers meant by a plain ``recompute: full``; the canonical form clips it to the model's depth."""


class Section(BaseModel):
    """Base of all parts of a sweep file: closed, strict, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True)


def fault(key: str | None, message: str, remedy: str) -> PydanticCustomError:
    """An error about ``key`` of the section being validated (None: the section itself)."""
    context = {"text": message, "key": key or "", "remedy": remedy}
    return PydanticCustomError("sweep_fault", "{text}", context)


class ShortForms:
    """Annotation: also take one of a few plain words, standing for the mappings in ``expand``."""

    def __init__(self, expand: Mapping[str, Mapping[str, Any]]) -> None:
        self.expand = expand

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._widen, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self.expand)}, handler(schema)]}

    def _widen(self, value: Any) -> Any:
        if isinstance(value, str) and value in self.expand:
            return self.expand[value]
        if isinstance(value, Mapping | BaseModel | Precision | NoRecompute | FullRecompute):
            return value
        choices = ", ".join(self.expand)
        raise fault(None, f"expected one of {choices} or a mapping, got {value!r}", f"Write one of {choices}.")


class LossScaleSection(Section):
    """Loss scaling for float16."""

    initial: float = Field(default=LossScale().initial, gt=0, description="Scale at the start.")
    growth_factor: float = Field(
        default=LossScale().growth_factor, gt=1, description="Growth after enough finite steps."
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

    level: Literal["O0", "O1", "O2"] = Field(
        description="O0: fp32. O1: autocast. O2: 16-bit parameters with fp32 master weights."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="16-bit type of O1 and O2; left out: bfloat16."
    )
    loss_scale: LossScaleSection | None = Field(
        default=None, description="Loss scaling, float16 only; left out: dynamic from 2^15."
    )

    @model_validator(mode="after")
    def _consistent(self) -> PrecisionSection:
        if self.level == "O0" and self.dtype not in (None, "float32"):
            raise fault("dtype", f"O0 is float32, not {self.dtype}", "Use O1 or O2, or leave dtype out.")
        if self.level != "O0" and self.dtype == "float32":
            raise fault("dtype", f"{self.level} needs a 16-bit type", "Use bfloat16 or float16, or level O0.")
        if self.loss_scale is not None and self.dtype != "float16":
            raise fault("loss_scale", "loss scaling is for float16 only", "Leave it out or set dtype: float16.")
        return self

    def to_precision(self) -> Precision:
        dtype = self.dtype or ("float32" if self.level == "O0" else "bfloat16")
        scale = self.loss_scale or LossScaleSection()
        loss_scale = LossScale(**scale.model_dump()) if dtype == "float16" else None
        return Precision(level=self.level, dtype=dtype, loss_scale=loss_scale)


class RecomputeSection(Section):
    """Recompute of the first layers only."""

    full: int = Field(ge=0, le=EVERY_LAYER, description="Number of first layers to recompute fully.")

    def to_recompute(self) -> Recompute:
        return FullRecompute(num_layers=self.full) if self.full else NoRecompute()


def _write_precision(value: Precision) -> Any:
    if value.dtype != "float16":
        return {"level": value.level, "dtype": value.dtype}
    scale = value.loss_scale or LossScale()
    return {
        "level": value.level,
        "dtype": value.dtype,
        "loss_scale": {name: getattr(scale, name) for name in LossScaleSection.model_fields},
    }


def _write_recompute(value: Recompute) -> Any:
    if isinstance(value, NoRecompute):
        return "none"
    return "full" if value.num_layers == EVERY_LAYER else {"full": value.num_layers}


def _off_is_false(value: Any) -> Any:
    """YAML 1.1 reads a bare ``off`` as false; here it can only mean the word."""
    return "off" if value is False else value


PrecisionValue = Annotated[
    PrecisionSection,
    ShortForms({level: {"level": level} for level in ("O0", "O1", "O2")}),
    AfterValidator(PrecisionSection.to_precision),
    PlainSerializer(_write_precision),
]
RecomputeValue = Annotated[
    RecomputeSection,
    ShortForms({"none": {"full": 0}, "full": {"full": EVERY_LAYER}}),
    AfterValidator(RecomputeSection.to_recompute),
    PlainSerializer(_write_recompute),
]
CompileValue = Annotated[
    Literal["off", "block"],
    BeforeValidator(_off_is_false),
    WithJsonSchema({"enum": ["off", "block", False]}),
]
Degree = Annotated[int, Field(ge=1, le=2**20)]


class OneOrMany:
    """Annotation for a tuple: a single value stands for a tuple of one; empty and repeated choices are refused."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        several = core_schema.no_info_after_validator_function(self._check, handler(source))
        return core_schema.no_info_before_validator_function(self._wrap, several)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        array = handler(schema)
        return {"anyOf": [array["items"], {**array, "minItems": 1, "uniqueItems": True}]}

    @staticmethod
    def _wrap(value: Any) -> Any:
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    @staticmethod
    def _check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not values:
            raise fault(None, "an empty list leaves nothing to choose from", "List at least one value.")
        for i, value in enumerate(values):
            if value in values[:i]:
                raise fault(None, "the same choice is listed twice", f"Remove number {i + 1} of the list.")
        return values
