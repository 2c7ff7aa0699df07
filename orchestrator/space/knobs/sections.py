"""Building blocks of the sections of a sweep file: base class, faults, and annotations for short forms and lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Section(BaseModel):
    """Base of all parts of a sweep file: closed, strict, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True)


def fault(key: str | None, message: str, remedy: str) -> PydanticCustomError:
    """An error about ``key`` of the section being validated (None: the section itself)."""
    context = {"text": message, "key": key or "", "remedy": remedy}
    return PydanticCustomError("sweep_fault", "{text}", context)


def show(value: Any) -> str:
    """A value of the file in an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class ShortForms:
    """Annotation: also take one of a few plain words, standing for the mappings in ``expand``.

    ``others`` are words that something around it takes, for the message.
    """

    def __init__(
        self, expand: Mapping[str, Mapping[str, Any]], *, others: tuple[str, ...] = (), remedy: str | None = None
    ) -> None:
        self.expand = expand
        self.words = ", ".join((*others, *expand))
        self.remedy = remedy or f"Write one of {self.words}, or a mapping."

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._widen, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        inner = handler(schema)
        return {"anyOf": [{"enum": list(self.expand)}, inner]} if self.expand else inner

    def _widen(self, value: Any) -> Any:
        if isinstance(value, str) and value in self.expand:
            return self.expand[value]
        if isinstance(value, Mapping | BaseModel):
            return value
        choices = f"one of {self.words}" if "," in self.words else self.words
        raise fault(None, f"expected {choices} or a mapping, got {show(value)}", self.remedy)


class Word:
    """Annotation: also take one word, which means ``value`` whatever the rest of the type makes of mappings.

    YAML 1.1 reads a bare ``off`` as false; where the word is ``off`` it can only mean that.
    """

    def __init__(self, word: str, value: Any) -> None:
        self.spellings = (word, False) if word == "off" else (word,)
        self.value = value

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._take, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        inner = handler(schema)
        return {"anyOf": [{"enum": list(self.spellings)}, *inner.get("anyOf", [inner])]}

    def _take(self, value: Any, handler: Callable[[Any], Any]) -> Any:
        return self.value if any(value is word or value == word for word in self.spellings) else handler(value)


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
