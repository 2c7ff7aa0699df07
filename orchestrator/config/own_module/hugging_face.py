"""Section ``workload.model`` for decoders that transformers builds from a ``config.json``, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, ValidationInfo, field_validator
from pydantic_core import CoreSchema

from orchestrator.config.own_module.counting import CountedSection, count_module
from orchestrator.config.scalars import resolve
from orchestrator.space.file_types import Section, fault, show
from trials.files import open_regular
from trials.spec import Data, HuggingFaceModel, ModuleFacts

MAX_BYTES = 1 << 20
_REMEDY = "Name the config.json of a decoder, relative to the sweep file."


class _OrFile:
    """Annotation: the schema also allows the path of the file; its content takes its place."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "string"}]}


class HuggingFaceSection(Section):
    """A decoder of the transformers package, with initial weights of its own."""

    kind: Literal["huggingface"] = Field(description="Model family.")
    config: Annotated[dict[str, Any], _OrFile()] = Field(
        description="Path of the model's config.json, relative to the sweep file, or its content."
    )
    counted: CountedSection | None = Field(
        default=None, description="What building it once here told of it; found out when left out."
    )

    @field_validator("config", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        """The content of the file, where it is one."""
        if not isinstance(value, str):
            return value
        file = resolve(value, info)
        try:
            with open_regular(Path(str(file))) as stream:
                content = json.loads(stream.read(MAX_BYTES))
        except OSError as error:
            raise fault(None, f"{file} cannot be read: {error.strerror or error}", _REMEDY) from None
        except ValueError as error:
            raise fault(None, f"{file} is no JSON: {error}", _REMEDY) from None
        return content

    @field_validator("config")
    @classmethod
    def _check(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("model_type"), str):
            raise fault(None, "no 'model_type'", _REMEDY)
        return value

    @property
    def vocab_size(self) -> int:
        """Number of token ids.

        Raises:
            PydanticCustomError: the configuration has none.
        """
        text = self.config.get("text_config")
        found = self.config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
        if not isinstance(found, int) or found < 1:
            raise fault("model.config", f"vocab_size is {show(found)}", _REMEDY)
        return found

    def count(self, data: Data, seq_length: int) -> None:
        """Find out what is not known, once.

        Raises:
            PydanticCustomError: transformers is not installed here, or cannot build the model.
        """
        if self.counted is None:
            self.__dict__["counted"] = count_module(self.to_model(), data, seq_length)

    def to_model(self) -> HuggingFaceModel:
        counted = self.counted
        return HuggingFaceModel(
            config=json.dumps(self.config, sort_keys=True),
            vocab_size=self.vocab_size,
            shape=counted.to_shape() if counted else None,
            facts=counted.to_facts() if counted else ModuleFacts(num_layers=1),
        )
