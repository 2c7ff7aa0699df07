"""Section ``workload`` of a sweep file for the built-in runner: built-in models, decoders of transformers and user
PyTorch modules, with data and optimiser; checks that the data can be read.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import json
import os
import subprocess
import sys
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from cluster.processes import python_module
from orchestrator.config.settings import Positive, Size, is_there, resolve
from orchestrator.errors import reason_of
from orchestrator.space.file_types import Section, fault, received, show
from trials.accelerator.kinds import without_devices
from trials.files import from_json, open_regular, to_json
from trials.legality import DATA_OF_MODEL
from trials.secrets import for_ranks
from trials.spec import (
    AdamW,
    Data,
    Experts,
    HuggingFaceModel,
    ImageFolderData,
    LatentAttention,
    LinearModel,
    LlamaModel,
    Model,
    ModuleFacts,
    PythonData,
    PythonModel,
    RandomData,
    ResNetModel,
    TextData,
    TokenFileData,
    UserModel,
    Workload,
)
from trials.user_code import FUNCTION, RESERVED

# Inspecting a module in a separate interpreter: planning imports neither torch nor user code

TIMEOUT_S = 600.0


class CountedSection(Section):
    """Properties of the module, found by building it once when the sweep was submitted."""

    num_layers: Size = Field(description="The number of layers in the list.")
    num_parameters: int = Field(default=0, ge=0, description="The number of trained parameters; 0 if unknown.")
    flops_per_sample: float = Field(default=0.0, ge=0, description="The forward and backward FLOPs per sample.")
    activation_elements: int = Field(default=0, ge=0, description="Elements kept per sample for the backward pass.")
    num_kernels: int = Field(default=0, ge=0, description="The number of operators in a forward pass.")
    has_batch_norm: bool = Field(default=False, description="Whether the module uses batch normalisation.")
    has_convolutions: bool = Field(default=False, description="Whether the module has `Conv2d` layers.")
    has_loose_norms: bool = Field(default=False, description="Whether root-mean-square norms are several operators.")
    no_pipeline: str | None = Field(default=None, description="Why a pipeline cannot split the module; null if it can.")
    no_tensor_parallel: str | None = Field(
        default=None, description="Why `tp` cannot split the module; null if it can."
    )
    head: str | None = Field(
        default=None, description="The module that computes the logits and can compute the loss; null if none."
    )
    shape: dict[str, float] | None = Field(
        default=None, description="The dimensions of a similar decoder, used to predict the step time; null if none."
    )

    def to_facts(self) -> ModuleFacts:
        return self.to(ModuleFacts)

    def to_shape(self) -> LlamaModel | None:
        if self.shape is None:
            return None
        whole = {key: int(value) for key, value in self.shape.items() if key not in ("rope_theta", "norm_eps")}
        return LlamaModel(**{**self.shape, **whole})  # type: ignore[arg-type]


def count_module(model: UserModel, data: Data, seq_length: int) -> CountedSection:
    """Build the module in a child process without devices, and take a sample through it.

    Raises:
        PydanticCustomError: it cannot be built, or fails; with the reason.
    """
    request = {"model": to_json(model), "data": to_json(data), "seq_length": seq_length}
    reply = _query(json.dumps(request))
    if reply.get("problem") is not None:
        raise fault(None, str(reply["problem"]), "See docs/python-workload.md for the requirements.")
    facts: ModuleFacts = from_json(ModuleFacts, reply["facts"])
    shape = reply.get("shape")
    if shape is not None:
        shape = {key: value for key, value in shape.items() if key not in ("kind", "experts", "latent")}
    return CountedSection(**to_json(facts), shape=shape)


@functools.lru_cache(maxsize=4)
def _query(request: str) -> dict[str, Any]:
    """The child's reply; a sweep file is read several times during submission, but its code is inspected once."""
    environment = {**without_devices(for_ranks(os.environ)), "TRANSFORMERS_VERBOSITY": "error"}
    command = python_module("trials.models.module_facts")
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        message = f"building the model and one step on a sample took longer than {TIMEOUT_S:.0f} s"
        raise fault(None, message, "Set `counted: {num_layers: N}` to skip this step.") from None
    try:
        reply: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        words = done.stderr.strip().splitlines()
        last_line = words[-1][:300] if words else "no output"
        message = f"building the model failed with status {done.returncode}: {last_line}"
        raise fault(
            None, message, "Check that the host has enough memory, or set `counted: {num_layers: N}` to skip this step."
        ) from None
    return reply


# Decoders that transformers builds from a ``config.json``, without weights

MAX_BYTES = 1 << 20
_NAME_CONFIG = "Set the path of a decoder model's config.json, relative to the sweep file."


class _OrPath:
    """Annotation: the schema also allows the path of a file with the content."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "string"}]}


class HuggingFaceSection(Section):
    """A decoder from the transformers package, with its initial weights."""

    kind: Literal["huggingface"] = Field(description="The model family.")
    config: Annotated[dict[str, Any], _OrPath()] = Field(
        description="The path to the model's config.json, relative to the sweep file, or its content."
    )
    counted: CountedSection | None = Field(
        default=None, description="Properties of the model, found by building it (by default, on this machine)."
    )

    @field_validator("config", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        """The content of the file, if it is one."""
        if not isinstance(value, str):
            return value
        file = resolve(value, info)
        try:
            with open_regular(Path(str(file))) as stream:
                content = json.loads(stream.read(MAX_BYTES))
        except OSError as error:
            raise fault(None, f"cannot read {str(file)!r}: {reason_of(error)}", _NAME_CONFIG) from None
        except ValueError as error:
            raise fault(None, f"{str(file)!r} is not valid JSON: {error}", _NAME_CONFIG) from None
        return content

    @field_validator("config")
    @classmethod
    def _check(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("model_type"), str):
            raise fault(None, "the file has no 'model_type'", _NAME_CONFIG)
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
            raise fault("model.config", f"expected an integer vocab_size{received(found)}", _NAME_CONFIG)
        return found

    def count(self, data: Data, seq_length: int) -> None:
        """Determine unknown properties, once.

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


# Built-in models, data and optimiser


_EXPERTS = Experts(num_experts=1, top_k=1, ffn_hidden_size=1)
"""For its defaults."""


class ExpertsSection(Section):
    """A mixture of experts as the feed-forward network."""

    num_experts: Size = Field(description="The number of routed experts in a layer.")
    top_k: Size = Field(description="The number of routed experts per token, at most `num_experts`.")
    ffn_hidden_size: Size = Field(description="The inner width of a routed expert.")
    shared_ffn_hidden_size: int = Field(
        default=_EXPERTS.shared_ffn_hidden_size,
        ge=0,
        description="The total inner width of the experts that process every token; 0 for none.",
    )
    num_dense_layers: int = Field(
        default=_EXPERTS.num_dense_layers, ge=0, description="The number of initial layers with a dense feed-forward."
    )
    scores: Literal["softmax", "sigmoid"] = Field(
        default=_EXPERTS.scores, description="The function that turns the router's logits into weights."
    )
    normalizes: bool = Field(
        default=_EXPERTS.normalizes, description="Whether the weights of a token's experts are scaled to sum to 1."
    )
    balance_rate: float = Field(
        default=_EXPERTS.balance_rate,
        ge=0,
        le=1,
        description="The step size of the bias that balances the experts; 0 for no balancing.",
    )
    aux_loss: float = Field(
        default=_EXPERTS.aux_loss,
        ge=0,
        le=100,
        description="The weight of the per-sequence loss that balances the experts, such as 1e-4; 0 for none.",
    )
    z_loss: float = Field(
        default=_EXPERTS.z_loss,
        ge=0,
        le=100,
        description="The weight of the router's z-loss, which keeps logits small, such as 1e-3; 0 for none.",
    )
    capacity: float | None = Field(
        default=_EXPERTS.capacity,
        gt=0,
        le=1e6,
        description="The maximum number of tokens per expert and sequence, relative to the mean. Further tokens skip "
        "the expert. If null, there is no limit.",
    )
    routing: Literal["learned", "balanced"] = Field(
        default=_EXPERTS.routing,
        description="How tokens are routed: `learned` uses the scores; `balanced` uses all experts in turn, because an "
        "untrained router is unbalanced.",
    )

    def to_experts(self) -> Experts:
        return self.to(Experts)


class LatentSection(Section):
    """Multi-head latent attention, in place of grouped-query attention."""

    kv_lora_rank: Size = Field(description="The width of the vector that keys and values are projected from.")
    qk_nope_head_dim: Size = Field(description="The size of a query or key without its rotary part.")
    qk_rope_head_dim: Size = Field(description="The size of the rotary part of a query or key. Must be even.")
    v_head_dim: Size = Field(description="The size of a value, at most that of a key.")
    q_lora_rank: int = Field(
        default=0, ge=0, description="The width of the latent vector for queries; 0 to use the hidden states."
    )

    def to_latent(self) -> LatentAttention:
        return self.to(LatentAttention)


class LlamaSection(Section):
    """A Llama-style decoder."""

    kind: Literal["llama"] = Field(description="The model family.")
    hidden_size: Size = Field(description="The width of the residual stream.")
    num_layers: Size = Field(description="The number of transformer blocks.")
    num_heads: Size = Field(description="The number of query heads. Must divide `hidden_size`.")
    num_kv_heads: Size = Field(description="The number of key and value heads. Must divide `num_heads`.")
    ffn_hidden_size: Size = Field(description="The inner width of the SwiGLU feed-forward network.")
    vocab_size: int = Field(
        default=256, ge=256, le=2**31 - 1, description="The number of token IDs. Byte-level tokens require 256."
    )
    rope_theta: Positive = Field(default=10000.0, description="The base of the rotary position embedding.")
    norm_eps: Positive = Field(default=1e-5, description="The epsilon of RMSNorm.")
    experts: ExpertsSection | None = Field(
        default=None, description="A mixture of experts as the feed-forward network. If null, the model is dense."
    )
    latent: LatentSection | None = Field(
        default=None,
        description="Multi-head latent attention, in place of grouped-query attention. Requires `num_kv_heads` to "
        "equal `num_heads`. If null, the model uses grouped-query attention.",
    )

    @model_validator(mode="after")
    def _divisible(self) -> LlamaSection:
        hidden, heads = self.hidden_size, self.num_heads
        if self.latent is not None:
            self._check_latent(self.latent)
        elif hidden % heads:
            raise fault(
                "num_heads", f"hidden_size ({hidden}) is not a multiple of num_heads ({heads})", "Change one of them."
            )
        elif hidden // heads % 2:
            message = f"the size of a head is odd (hidden_size {hidden} / num_heads {heads})"
            raise fault("num_heads", message, "Rotary embeddings require an even size.")
        if heads % self.num_kv_heads:
            message = f"num_heads ({heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})"
            raise fault("num_kv_heads", message, "Change one of them.")
        if self.experts is not None:
            self._check_experts(self.experts)
        return self

    def _check_latent(self, latent: LatentSection) -> None:
        if self.num_kv_heads != self.num_heads:
            message = f"latent attention requires num_kv_heads ({self.num_kv_heads}) to equal num_heads"
            raise fault("num_kv_heads", message, f"Set num_kv_heads to {self.num_heads}.")
        if latent.qk_rope_head_dim % 2:
            message = f"{latent.qk_rope_head_dim} is odd"
            raise fault("latent.qk_rope_head_dim", message, "Rotary embeddings require an even size.")
        if latent.v_head_dim > (size := latent.qk_nope_head_dim + latent.qk_rope_head_dim):
            raise fault("latent.v_head_dim", f"{latent.v_head_dim} exceeds the {size} of a key", "Change one of them.")

    def _check_experts(self, experts: ExpertsSection) -> None:
        if experts.top_k > experts.num_experts:
            message = f"top_k ({experts.top_k}) is greater than num_experts ({experts.num_experts})"
            raise fault("experts.top_k", message, "Change one of them.")
        if experts.num_dense_layers >= self.num_layers:
            message = f"no layer is left for experts: the model has {self.num_layers} layers"
            raise fault("experts.num_dense_layers", message, "Use a smaller number, or remove experts.")

    def to_model(self) -> LlamaModel:
        experts = None if self.experts is None else self.experts.to_experts()
        return self.to(LlamaModel, experts=experts, latent=None if self.latent is None else self.latent.to_latent())


class ResNetSection(Section):
    """ResNet v1.5, for images."""

    kind: Literal["resnet"] = Field(description="The model family.")
    depth: Literal[18, 50] = Field(
        default=ResNetModel().depth, description="18 with basic blocks, 50 with bottlenecks."
    )
    num_classes: Size = Field(default=ResNetModel().num_classes, description="The number of classes.")
    image_size: int = Field(
        default=ResNetModel().image_size, ge=32, le=4096, description="The height and width of the images, in pixels."
    )
    width: Size = Field(default=ResNetModel().width, description="The number of channels in the first stage.")

    def to_model(self) -> ResNetModel:
        return self.to(ResNetModel)


class LinearSection(Section):
    """A chain of square `Linear` layers: pure matrix multiplication."""

    kind: Literal["linear"] = Field(description="The model family.")
    num_layers: Size = Field(default=LinearModel().num_layers, description="The number of layers.")
    size: Size = Field(default=LinearModel().size, description="The number of inputs, and of outputs, of every layer.")

    def to_model(self) -> LinearModel:
        return self.to(LinearModel)


MAX_LENGTHS = 1000
"""Number of lengths that a distribution is reduced to."""
_LENGTHS_REMEDY = (
    "Use a list of lengths, percentiles such as {p0: 16, p50: 300, p100: 4096}, or the path to a text file with one "
    "length per line. For a token file, {end_token: 2} also works."
)


def _read_lengths(value: Any, info: ValidationInfo) -> Any:
    """Turn every form of a distribution into lengths, ascending and equally likely."""
    if isinstance(value, str):
        value = _listed_lengths(Path(str(resolve(value, info))))
    elif isinstance(value, Mapping) and set(value) == {"end_token"}:
        value = _document_lengths(value["end_token"], info.data)
    elif isinstance(value, Mapping):
        value = _of_percentiles(value)
    if not isinstance(value, list | tuple):
        raise fault(None, f"{show(value)} is not a distribution of lengths", _LENGTHS_REMEDY)
    for place, one in enumerate(value):
        if type(one) is not int or not 1 <= one < 2**31:
            raise fault(str(place), f"expected a length of at least 1 token{received(one)}", _LENGTHS_REMEDY)
    ordered = sorted(value)
    if len(ordered) <= MAX_LENGTHS:
        return tuple(ordered)
    return tuple(ordered[int((i + 0.5) / MAX_LENGTHS * len(ordered))] for i in range(MAX_LENGTHS))


def _of_percentiles(points: Mapping[Any, Any]) -> list[int]:
    """Interpolate between percentiles."""
    try:
        places = sorted((float(str(name).removeprefix("p")), float(length)) for name, length in points.items())
    except (TypeError, ValueError):
        raise fault(None, f"invalid percentiles {show(dict(points))}", _LENGTHS_REMEDY) from None
    ordered = [length for _, length in places]
    if len(places) < 2 or places[0][0] != 0 or places[-1][0] != 100 or ordered != sorted(ordered):
        raise fault(None, "percentiles must include p0 and p100, and lengths must not decrease", _LENGTHS_REMEDY)
    found = []
    for number in range(100):
        at = number + 0.5
        (low, least), (high, most) = next(pair for pair in itertools.pairwise(places) if at <= pair[1][0])
        found.append(round(least + (most - least) * (at - low) / (high - low)))
    return found


def _listed_lengths(path: Path) -> list[int]:
    """Read a text file with one length per line."""
    try:
        with open_regular(path) as stream:
            return [int(line) for line in stream.read(MAX_LENGTHS_BYTES).split()]
    except OSError as error:
        raise fault(None, f"cannot read {str(path)!r}: {reason_of(error)}", _LENGTHS_REMEDY) from None
    except ValueError:
        raise fault(None, f"{str(path)!r} has a line that is not an integer", _LENGTHS_REMEDY) from None


def _document_lengths(end_token: Any, file: Mapping[str, Any]) -> list[int]:
    """Measure the documents at the start of a token file, each of which ends with ``end_token``."""
    code = TokenFileSection.TYPE_CODES.get(file.get("dtype", ""))
    if code is None or "path" not in file:
        raise fault(None, "'end_token' requires a token file with a valid path and dtype", _LENGTHS_REMEDY)
    ids = array(code)
    try:
        with open_regular(Path(file["path"])) as stream:
            content = stream.read(MAX_LENGTHS_BYTES)
    except OSError as error:
        raise fault(None, f"cannot read {file['path']!r}: {reason_of(error)}", _LENGTHS_REMEDY) from None
    ids.frombytes(content[: len(content) // ids.itemsize * ids.itemsize])
    if sys.byteorder == "big":
        ids.byteswap()
    ends = [place for place, token in enumerate(ids) if token == end_token]
    if not ends:
        raise fault(None, f"{file['path']!r} does not contain the end token {show(end_token)}", _LENGTHS_REMEDY)
    return [end - start for start, end in itertools.pairwise([-1, *ends])]


MAX_LENGTHS_BYTES = 8 << 20
"""Bytes of a file from which lengths are read."""

Lengths = Annotated[
    tuple[int, ...],
    BeforeValidator(_read_lengths),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 1}},
                {"type": "object", "additionalProperties": {"type": "number"}},
                {"type": "string"},
            ]
        }
    ),
]
_LENGTHS_FIELD = Field(
    default=None,
    description="The distribution of sample lengths in tokens: a list of equally likely lengths, percentiles such as "
    "`{p0: 16, p50: 300, p100: 4096}`, or the path to a text file with one length per line. Longer samples "
    "are cut to `seq_length`. If null, every sample has `seq_length` tokens.",
)


class TextSection(Section):
    """Byte-level tokens from text files. This is the default for llama models."""

    kind: Literal["text"] = Field(description="How the data is read.")
    path: str | None = Field(
        default=None,
        description="A file or directory, relative to the sweep file. If null, Python's standard library is used.",
    )
    pattern: str = Field(default="*.py", min_length=1, description="A glob pattern for files, applied recursively.")
    lengths: Lengths | None = _LENGTHS_FIELD

    _resolve = field_validator("path")(resolve)

    def to_data(self) -> TextData:
        return TextData(path=self.path, pattern=self.pattern, lengths=self.lengths or ())

    def check_files(self, model: Model, seq_length: int) -> None:  # noqa: ARG002
        if self.path is not None:
            check_text(Path(self.path), self.pattern, num_bytes=seq_length + 1)


class TokenFileSection(Section):
    """Token IDs in one flat binary file, little-endian, for llama models."""

    kind: Literal["token_file"] = Field(description="How the data is read.")
    path: str = Field(description="The path to the file, relative to the sweep file.")
    dtype: Literal["uint8", "uint16", "int32", "int64"] = Field(default="uint16", description="The type of a token ID.")
    lengths: Lengths | None = Field(
        default=None,
        description="The distribution of sample lengths in tokens, as for `kind: text`, or `{end_token: 2}` to use the "
        "lengths between the occurrences of this token in the file.",
    )

    NUM_BYTES: ClassVar[Mapping[str, int]] = {"uint8": 1, "uint16": 2, "int32": 4, "int64": 8}
    TYPE_CODES: ClassVar[Mapping[str, str]] = {"uint8": "B", "uint16": "H", "int32": "i", "int64": "q"}
    """Type codes of Python's ``array`` module."""
    _resolve = field_validator("path")(resolve)

    def to_data(self) -> TokenFileData:
        return TokenFileData(path=self.path, dtype=self.dtype, lengths=self.lengths or ())

    def check_files(self, model: Model, seq_length: int) -> None:
        check_tokens(Path(self.path), num_tokens=seq_length + 1, token_bytes=self.NUM_BYTES[self.dtype])
        assert isinstance(model, LlamaModel | HuggingFaceModel), "other models read no tokens"
        check_ids(Path(self.path), self.TYPE_CODES[self.dtype], vocab_size=model.vocab_size)


class ImageFolderSection(Section):
    """JPEG files in one directory per class, for resnet models."""

    kind: Literal["image_folder"] = Field(description="How the data is read.")
    path: str | None = Field(
        default=None,
        description="The directory with one subdirectory per class, relative to the sweep file. If null, images are "
        "synthetic.",
    )

    _resolve = field_validator("path")(resolve)

    def to_data(self) -> ImageFolderData:
        return ImageFolderData(path=self.path)

    def check_files(self, model: Model, seq_length: int) -> None:  # noqa: ARG002
        assert isinstance(model, ResNetModel), "other models read no images"
        if self.path is not None:
            check_images(Path(self.path), num_classes=model.num_classes)


class RandomSection(Section):
    """Normally distributed vectors, drawn at each step, for linear models."""

    kind: Literal["random"] = Field(description="How the data is read.")

    def to_data(self) -> RandomData:
        return RandomData()

    def check_files(self, model: Model, seq_length: int) -> None:
        """Check nothing: random data needs no files."""


class OptimizerSection(Section):
    """The AdamW optimiser."""

    kind: Literal["adamw"] = Field(default="adamw", description="The optimiser.")
    lr: Positive = Field(default=AdamW().lr, description="The learning rate, which is constant.")
    beta1: float = Field(default=AdamW().beta1, ge=0, lt=1, description="The decay rate of the first moment.")
    beta2: float = Field(default=AdamW().beta2, ge=0, lt=1, description="The decay rate of the second moment.")
    eps: Positive = Field(default=AdamW().eps, description="The term added to the denominator.")
    weight_decay: float = Field(default=AdamW().weight_decay, ge=0, description="The decoupled weight decay.")
    clip_norm: Positive | None = Field(
        default=None,
        description="The maximum global gradient norm. Larger gradients are scaled down to it before the update, once "
        "the loss scale has been removed. If null, gradients are not clipped.",
    )

    def to_optimizer(self) -> AdamW:
        return AdamW(**self.model_dump(exclude={"kind"}, exclude_none=True))


ModelSection = LlamaSection | ResNetSection | LinearSection | HuggingFaceSection


DataSection = TextSection | TokenFileSection | ImageFolderSection | RandomSection


MODEL_SECTIONS: Mapping[str, type[Section]] = {
    "llama": LlamaSection,
    "resnet": ResNetSection,
    "linear": LinearSection,
    "huggingface": HuggingFaceSection,
}


_MODELS: Mapping[str, type[Model]] = {cls.kind: cls for cls in DATA_OF_MODEL}


class WorkloadSection(Section):
    """A model that the built-in runner trains. It is the same in every trial."""

    TAG: ClassVar[str] = "built-in"
    model: Annotated[Annotated[ModelSection, Field(discriminator="kind")], _OrPath()] = Field(
        description="The model, as a mapping or as the path to a YAML file, relative to the sweep file."
    )
    data: Annotated[DataSection, Field(discriminator="kind")] = Field(
        default=None,
        validate_default=True,
        description="The training data. Its kind defaults to `text` for llama and huggingface, `image_folder` for "
        "resnet, and `random` for linear.",
    )
    seq_length: Size | None = Field(
        default=None, description="Tokens per sequence. Required for llama and huggingface, not allowed for others."
    )
    global_batch_size: Size = Field(description="The number of samples (sequences) per optimiser step, over all ranks.")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="The optimiser.")
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="The seed for weights and data order.")

    @model_validator(mode="before")
    @classmethod
    def _default_kind(cls, values: Any) -> Any:
        """The kind of data follows from that of the model."""
        model = values.get("model") if isinstance(values, Mapping) else None
        kind = model.get("kind") if isinstance(model, Mapping) else None
        data = values.get("data", {}) if isinstance(values, Mapping) else None
        if not isinstance(data, Mapping) or "kind" in data:
            return values
        default = DATA_OF_MODEL[_MODELS[kind]][0].kind if isinstance(kind, str) and kind in _MODELS else TextData.kind
        return {**values, "data": {"kind": default, **data}}

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> WorkloadSection:
        reads_tokens = self.model.kind in ("llama", "huggingface")
        if reads_tokens and self.seq_length is None:
            raise fault("seq_length", "required key is missing", "Add 'seq_length'.")
        if not reads_tokens and self.seq_length not in (None, 1):
            raise fault("seq_length", f"{self.model.kind} models do not read sequences", "Remove seq_length.")
        if getattr(self.data, "lengths", None) and getattr(self.model, "experts", None) is not None:
            message = "not supported for mixture-of-experts models: padding would distort the balance of their experts"
            raise fault("data.lengths", message, "Remove lengths, or use a dense model.")
        fitting = [data.kind for data in DATA_OF_MODEL[_MODELS[self.model.kind]]]
        if self.data.kind not in fitting:
            message = f"{self.model.kind} models cannot train on {self.data.kind!r} data"
            raise fault("data.kind", message, f"Use {' or '.join(map(repr, fitting))}.")
        if isinstance(self.model, HuggingFaceSection) and (info.context or {}).get("check_files", True):
            self._count(self.model)
        if self._are_files_here(info.context or {}):
            self.data.check_files(self.model.to_model(), self.tokens_per_sample)
        return self

    def _are_files_here(self, context: Mapping[str, Any]) -> bool:
        """Whether to check the data: those of a remote cluster may exist only on its hosts."""
        path = getattr(self.data, "path", None)
        is_elsewhere = context.get("is_remote", False) and path is not None and not is_there(Path(path))
        return bool(context.get("check_files", True)) and not is_elsewhere

    def _count(self, model: HuggingFaceSection) -> None:
        if model.vocab_size < 256 and isinstance(self.data, TextSection):
            message = f"vocab_size is {model.vocab_size}, but text data needs 256 (one id per byte)"
            raise fault("model.config", message, "Use data.kind: token_file.")
        try:
            model.count(self.data.to_data(), self.tokens_per_sample)
        except PydanticCustomError as error:
            context = error.context or {}
            raise fault("model.config", str(context["text"]), str(context["remedy"])) from None

    def to_workload(self) -> Workload:
        return Workload(
            model=self.model.to_model(),
            data=self.data.to_data(),
            seq_length=self.tokens_per_sample,
            global_batch_size=self.global_batch_size,
            optimizer=self.optimizer.to_optimizer(),
            seed=self.seed,
        )

    @property
    def tokens_per_sample(self) -> int:
        """Tokens in one sample; 1 if samples are not sequences."""
        return self.seq_length or 1


SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
"""Folders without training text, as in the runner, which cannot be imported here."""


NUM_SAMPLES, SAMPLE_BYTES = 16, 1 << 18
"""Number of positions of a token file at which ids are checked, and bytes checked at each."""


IMAGE_SUFFIXES = (".jpg", ".jpeg")


_REMEDY = "Check the path (relative to the sweep file) and its permissions."


def check_text(root: Path, pattern: str, *, num_bytes: int) -> None:
    """Raise a fault unless ``root``, or the matching files in it, can be read and contain ``num_bytes``."""
    remedy = "Check the path (relative to the sweep file), its permissions and the pattern."
    found = 0
    path = root
    try:
        for path in _files(root, pattern):
            with open_regular(path) as stream:
                found += len(stream.read(num_bytes - found))
            if found >= num_bytes:
                return
    except OSError as error:
        raise fault("data.path", f"cannot read {str(path)!r}: {reason_of(error)}", remedy) from None
    where = f"files matching {pattern!r} in {root}" if root.is_dir() else str(root)
    message = f"expected at least {num_bytes} bytes (one sequence and its target) in {where}, found {found}"
    raise fault("data.path", message, remedy)


def _files(root: Path, pattern: str) -> Iterator[Path]:
    """The files the runner reads, in its order."""
    if not root.is_dir():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if fnmatch.fnmatch(name, pattern))


def check_tokens(path: Path, *, num_tokens: int, token_bytes: int) -> None:
    """Raise a fault unless the file can be read and contains a whole number of tokens, at least ``num_tokens``."""
    found, left = divmod(_size(path), token_bytes)
    if left:
        message = f"the size of {str(path)!r} is not a multiple of {token_bytes} bytes per token id"
        raise fault("data.path", message, "Check the path and dtype.")
    if found < num_tokens:
        message = f"expected at least {num_tokens} tokens (one sequence and its target) in {str(path)!r}, found {found}"
        raise fault("data.path", message, "Check the path and dtype.")


def check_ids(path: Path, type_code: str, *, vocab_size: int) -> None:
    """Raise a fault if a sample of the file contains ids outside the model's vocabulary."""
    ids = array(type_code)
    size = _size(path)
    with open_regular(path) as stream:
        for number in range(NUM_SAMPLES):
            stream.seek(size * number // NUM_SAMPLES // ids.itemsize * ids.itemsize)
            ids.frombytes(stream.read(min(SAMPLE_BYTES, size)))
    if sys.byteorder == "big":
        ids.byteswap()
    bad = next((found for found in (min(ids), max(ids)) if not 0 <= found < vocab_size), None)
    if bad is not None:
        message = f"{str(path)!r} contains token id {bad}, but the model's ids are 0 to {vocab_size - 1}"
        raise fault(
            "model.vocab_size",
            message,
            "Set vocab_size to the size of the tokenizer's vocabulary, or check data.dtype.",
        )


def check_images(root: Path, *, num_classes: int) -> None:
    """Raise a fault unless a class folder in ``root`` contains a readable JPEG file, and the model has as many
    classes as there are folders."""
    try:
        folders = sorted(folder for folder in root.iterdir() if folder.is_dir())
        files = (file for folder in folders for file in folder.rglob("*"))
        image = next((file for file in files if file.suffix.lower() in IMAGE_SUFFIXES), None)
    except OSError as error:
        raise fault("data.path", f"cannot read {str(root)!r}: {reason_of(error)}", _REMEDY) from None
    if image is None:
        raise fault("data.path", f"{str(root)!r} has no class directories with JPEG files", _REMEDY)
    _size(image)
    if len(folders) > num_classes:
        message = f"the model has {num_classes} classes, but {str(root)!r} has {len(folders)} class directories"
        raise fault("model.num_classes", message, f"Set num_classes: {len(folders)}, or check data.path.")


def _size(path: Path) -> int:
    try:
        with open_regular(path) as stream:
            return stream.seek(0, os.SEEK_END)
    except OSError as error:
        raise fault("data.path", f"cannot read {str(path)!r}: {reason_of(error)}", _REMEDY) from None


# A PyTorch module of the user, trained by the built-in runner


def _function(value: str) -> str:
    if FUNCTION.fullmatch(value) is None:
        raise fault(None, f"expected MODULE:FUNCTION, got {show(value)}", "Use a value such as my_model:build.")
    package = value.partition(":")[0].partition(".")[0]
    if package in RESERVED:
        raise fault(None, f"your module cannot be called {package!r}: tune-cluster uses this name", "Rename the file.")
    return value


FunctionName = Annotated[
    str, AfterValidator(_function), WithJsonSchema({"type": "string", "pattern": FUNCTION.pattern})
]
ModulePath = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]
ModulePattern = Annotated[str, Field(pattern=r"^(\w+|\*)(\.(\w+|\*))*$")]
Style = Literal["colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce"]


class PythonSection(Section):
    """Your own PyTorch module, parallelised by the built-in runner (see docs/python-workload.md)."""

    TAG: ClassVar[str] = "python"
    kind: Literal["python"] = Field(description="The kind of workload.")
    model: FunctionName = Field(description="A function without arguments that builds the module: `my_model:build`.")
    loss: FunctionName = Field(description="A function of outputs and targets that returns the mean loss, a scalar.")
    data: FunctionName = Field(
        description="A function without arguments that returns a map-style dataset of pairs of input and target."
    )
    layers: ModulePath = Field(
        description="The dotted path to the list of layers (a `ModuleList`) in the module. These layers are the units "
        "of `pp`, `recompute`, FSDP and `compile`."
    )
    before: list[ModulePath] | None = Field(
        default=None, description="The modules that run before the layers. Required for `pp`, even if empty."
    )
    after: list[ModulePath] | None = Field(
        default=None, description="The modules that run after the layers. Required for `pp`, even if empty."
    )
    tensor_parallel: dict[ModulePattern, Style] = Field(
        default={},
        description="How `tp` splits modules, by path, such as `{layers.*.up: colwise}`. `*` matches one path part.",
    )
    cwd: str = Field(
        default=".",
        validate_default=True,
        description="The directory of the code, relative to the sweep file, and the working directory of the ranks.",
    )
    seq_length: Size | None = Field(default=None, description="Tokens per sample. If null, speed is in samples/s.")
    global_batch_size: Size = Field(description="The number of samples per optimiser step, over all ranks.")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="The optimiser.")
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="The seed for weights and data order.")
    counted: CountedSection | None = Field(
        default=None, description="Properties of the model, found by building it (by default, on this machine)."
    )

    _resolve = field_validator("cwd")(resolve)

    @model_validator(mode="after")
    def _count(self, info: ValidationInfo) -> PythonSection:
        """Inspect the code once, if it is on this host; on a remote cluster it may exist only on the nodes."""
        context: Any = info.context or {}
        if self.counted is not None or not context.get("check_files", True):
            return self
        if not is_there(Path(self.cwd)):
            if not context.get("is_remote", False):
                message = f"directory {str(self.cwd)!r} does not exist"
                raise fault("cwd", message, "Check the path; it is relative to the sweep file.")
            message = "the code is not on this host, so the number of layers is unknown"
            raise fault("counted", message, "Set counted: {num_layers: N}.")
        self.__dict__["counted"] = count_module(self.to_model(), self.to_data(), self.tokens_per_sample)
        return self

    @property
    def tokens_per_sample(self) -> int:
        """Tokens in one sample; 1 if samples are not sequences."""
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
