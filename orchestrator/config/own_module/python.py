"""Section ``workload`` of a sweep file whose workload is a PyTorch module of the user's, trained by our runner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from orchestrator.config.own_module.counting import CountedSection, count_module
from orchestrator.config.scalars import Size, is_there, resolve
from orchestrator.config.workload import OptimizerSection
from orchestrator.space.file_types import Section, fault, show
from trials.own_code import FUNCTION, RESERVED
from trials.spec import ModuleFacts, PythonData, PythonModel, Workload


def _function(value: str) -> str:
    if FUNCTION.fullmatch(value) is None:
        raise fault(None, f"{show(value)} does not name a function", "Write module:function, like my_model:build.")
    package = value.partition(":")[0].partition(".")[0]
    if package in RESERVED:
        raise fault(None, f"a module of yours cannot be called {package!r}: it is one of ours", "Rename the file.")
    return value


FunctionName = Annotated[
    str, AfterValidator(_function), WithJsonSchema({"type": "string", "pattern": FUNCTION.pattern})
]
ModulePath = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]
ModulePattern = Annotated[str, Field(pattern=r"^(\w+|\*)(\.(\w+|\*))*$")]
Style = Literal["colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce"]


class PythonSection(Section):
    """A PyTorch module of your own, which the runner parallelises. See docs/python-workload.md."""

    TAG: ClassVar[str] = "python"
    kind: Literal["python"] = Field(description="That it is one.")
    model: FunctionName = Field(description="Function that builds the module, without arguments: `my_model:build`.")
    loss: FunctionName = Field(description="Function of outputs and targets that gives the mean loss, a scalar.")
    data: FunctionName = Field(
        description="Function that gives the data set, without arguments: samples by number, pairs of input and target."
    )
    layers: ModulePath = Field(
        description="Where the module keeps its list of layers (ModuleList), dotted: unit of pp, recompute, FSDP and "
        "compile."
    )
    before: list[ModulePath] | None = Field(
        default=None, description="Modules that do all the work before the layers; pp needs it, also when empty."
    )
    after: list[ModulePath] | None = Field(
        default=None, description="Modules that do all the work after the layers; pp needs it, also when empty."
    )
    tensor_parallel: dict[ModulePattern, Style] = Field(
        default={}, description="How tp splits modules, by path, * for any one part: {layers.*.up: colwise}."
    )
    cwd: str = Field(
        default=".",
        validate_default=True,
        description="Folder of the code, relative to the sweep file; ranks work in it.",
    )
    seq_length: Size | None = Field(default=None, description="Tokens per sample; null: speeds count samples.")
    global_batch_size: Size = Field(description="Samples per optimiser step over all ranks.")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="The optimiser.")
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of weights and data order.")
    counted: CountedSection | None = Field(
        default=None, description="What building it once here told of it; found out when left out."
    )

    _resolve = field_validator("cwd")(resolve)

    @model_validator(mode="after")
    def _count(self, info: ValidationInfo) -> PythonSection:
        """Look at the code once, where it is; on a cluster elsewhere it may lie on the nodes only."""
        context: Any = info.context or {}
        if self.counted is not None or not context.get("check_files", True):
            return self
        if not is_there(Path(self.cwd)):
            if not context.get("is_remote", False):
                raise fault("cwd", f"there is no folder {self.cwd}", "The path is relative to the sweep file.")
            message = "the code is not here, so nobody knows how many layers it has"
            raise fault("counted", message, "Write counted: {num_layers: N}.")
        self.__dict__["counted"] = count_module(self.to_model(), self.to_data(), self.tokens_per_sample)
        return self

    @property
    def tokens_per_sample(self) -> int:
        """Tokens in one sample; 1 where samples are no sequences."""
        return self.seq_length or 1

    def to_model(self) -> PythonModel:
        return PythonModel(
            model=self.model,
            loss=self.loss,
            layers=self.layers,
            cwd=self.cwd,
            before=None if self.before is None else tuple(self.before),
            after=None if self.after is None else tuple(self.after),
            tensor_parallel=tuple(self.tensor_parallel.items()),
            facts=self.counted.to_facts() if self.counted else ModuleFacts(num_layers=1),
        )

    def to_data(self) -> PythonData:
        return PythonData(dataset=self.data, cwd=self.cwd)

    def to_workload(self) -> Workload:
        return Workload(
            model=self.to_model(),
            data=self.to_data(),
            seq_length=self.tokens_per_sample,
            global_batch_size=self.global_batch_size,
            optimizer=self.optimizer.to_optimizer(),
            seed=self.seed,
        )
