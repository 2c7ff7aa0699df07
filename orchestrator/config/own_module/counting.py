"""Has a module counted in an interpreter of its own: planning imports neither torch nor anything of the user's."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from typing import Any

from pydantic import Field

from cluster.processes import python_module
from orchestrator.config.scalars import Size
from orchestrator.space.file_types import Section, fault
from trials.accelerator.kinds import without_devices
from trials.files import from_json, to_json
from trials.secrets import for_ranks
from trials.spec import Data, LlamaModel, ModuleFacts, OwnModel

TIMEOUT_S = 600.0


class CountedSection(Section):
    """What building the module once, when the sweep was submitted, told of it."""

    num_layers: Size = Field(description="Layers in the list.")
    num_parameters: int = Field(default=0, ge=0, description="Trained parameters; 0: not known.")
    flops_per_sample: float = Field(default=0.0, ge=0, description="Forward and backward FLOPs of a sample.")
    activation_elements: int = Field(default=0, ge=0, description="Elements kept for the backward pass of a sample.")
    num_kernels: int = Field(default=0, ge=0, description="Operators of a forward pass.")
    has_batch_norm: bool = Field(default=False, description="Whether it normalises over the samples of a micro-batch.")
    no_pipeline: str | None = Field(default=None, description="Why a pipeline cannot split it; null: it can.")
    no_tensor_parallel: str | None = Field(default=None, description="Why tp cannot split it; null: it can.")
    head: str | None = Field(
        default=None, description="Module that makes a decoder's logits, and can make its loss; null: there is none."
    )
    shape: dict[str, float] | None = Field(
        default=None, description="Dimensions of the decoder like it, by which its time is predicted; null: none."
    )

    def to_facts(self) -> ModuleFacts:
        return ModuleFacts(**self.model_dump(exclude={"shape"}))

    def to_shape(self) -> LlamaModel | None:
        if self.shape is None:
            return None
        whole = {key: int(value) for key, value in self.shape.items() if key not in ("rope_theta", "norm_eps")}
        return LlamaModel(**{**self.shape, **whole})  # type: ignore[arg-type]


def count_module(model: OwnModel, data: Data, seq_length: int) -> CountedSection:
    """Build the module in a child process without devices, and take a sample through it.

    Raises:
        PydanticCustomError: it cannot be built, or fails; says why.
    """
    request = {"model": to_json(model), "data": to_json(data), "seq_length": seq_length}
    reply = _ask(json.dumps(request))
    if reply.get("problem") is not None:
        raise fault(None, str(reply["problem"]), "Correct it; docs/python-workload.md says what trials need.")
    facts: ModuleFacts = from_json(ModuleFacts, reply["facts"])
    shape = reply.get("shape")
    if shape is not None:
        shape = {key: value for key, value in shape.items() if key != "kind"}
    return CountedSection(**to_json(facts), shape=shape)


@functools.lru_cache(maxsize=4)
def _ask(request: str) -> dict[str, Any]:
    """The child's reply; a file is read more than once while it is submitted, but its code is looked at once."""
    environment = {**without_devices(for_ranks(os.environ)), "TRANSFORMERS_VERBOSITY": "error"}
    command = python_module("trials.models.module_facts")
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        message = f"building the model and one step on a sample took longer than {TIMEOUT_S:.0f} s"
        raise fault(None, message, "Write `counted: {num_layers: N}` to leave it out.") from None
    try:
        reply: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        words = done.stderr.strip().splitlines()
        said = words[-1][:300] if words else "it said nothing"
        message = f"building the model ended with status {done.returncode}: {said}"
        raise fault(None, message, "Is there enough memory here? `counted: {num_layers: N}` leaves it out.") from None
    return reply
