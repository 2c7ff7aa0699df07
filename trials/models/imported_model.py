"""Imported modules as models of the runner: custom ones, and those of transformers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trials.failure import InfeasibleSpec
from trials.models.built_in import Head
from trials.models.deferred import Recorder, plain_tensors
from trials.models.fused import FusedMeter
from trials.models.model import LayerList, Loss, TrainModel, cut, layers_in, pipeline_problem, plan_problem
from trials.sizes import Chunk
from trials.spec import LlamaModel, PythonModel
from trials.user_code import call_function, described, load_function

Call = Callable[[nn.Module, Tensor], Any]
"""Runs a module on a batch of inputs and returns its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A module in fp32, and what the runner needs to know about it."""

    module: nn.Module
    """With its values on the CPU or, if they are recorded, of fake tensors."""
    layers: str
    before: Sequence[str] | None
    after: Sequence[str] | None
    tensor_parallel: Sequence[tuple[str, ...]]
    """Pairs of pattern and style, see :mod:`trials.models.model`."""
    call: Call
    recorder: Recorder | None = None
    """What computes the values; None if the module has them."""


class ImportedModel(TrainModel):
    """Runs an imported module, or the part of it in one stage.

    Its head, if any (:attr:`~trials.spec.ModuleFacts.head`), is moved out of the module to ``output``, to compute the
    loss.
    """

    is_own: ClassVar[bool] = True

    def __init__(self, built: Built, chunk: Chunk, no_tensor_parallel: str | None, head: str | None = None) -> None:
        """``no_tensor_parallel`` is the reason why tensor parallelism cannot split it."""
        super().__init__()
        self.no_tensor_parallel = no_tensor_parallel
        self.module = built.module
        self.layers = LayerList(layers_in(built.module, built.layers), chunk.layer_ids)
        self.tensor_parallel = built.tensor_parallel
        self.output = _taken_out(self.module, head) if head is not None and chunk.is_last else None
        self.computes_loss = self.output is not None
        self.fused_meter = FusedMeter()
        """Counter of the fused operators in place of the module's own."""
        self._call = built.call
        self._input_dtype: torch.dtype | None = None
        self._recorder = built.recorder
        self._values: dict[str, Tensor] = {}
        """Initial values of parameters and buffers by name, until the model has storage."""

    def leave_values(self) -> None:
        """Move to the meta device; :meth:`value_of` has the values, whole, as long as the model has no storage."""
        self._values = {name: one.detach() for name, one in (*self.named_parameters(), *_buffers(self))}
        moved: dict[int, nn.Parameter] = {}
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(_on_meta(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved[id(parameter)]
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = _on_meta(buffer)

    def value_of(self, name: str) -> Tensor:
        """Return the whole initial value of a parameter or buffer, which is then forgotten."""
        return self._computed(self._values.pop(name))

    def _computed(self, value: Tensor) -> Tensor:
        return value if self._recorder is None else self._recorder.compute(value)

    def forget_values(self) -> None:
        """Free what is left of the initial values."""
        self._values.clear()
        self._recorder = None

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Allocate storage; weights that two modules share stay shared."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                places.setdefault(id(parameter), []).append((module, name))
        super().to_empty(device=device, recurse=recurse)
        for (first, name), *others in places.values():
            for module, other in others:
                module._parameters[other] = first._parameters[name]
        return self

    def materialize(self, device: torch.device) -> None:
        for name, buffer in _buffers(self):
            buffer.copy_(self.value_of(name))
        for module, name, tensor in plain_tensors(self):
            setattr(module, name, self._computed(tensor).to(device))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        """Return outputs or, with ``targets``, the loss; only modules with a head get targets."""
        if self._input_dtype is not None and x.is_floating_point():
            x = x.to(self._input_dtype)
        outputs = self._call(self.module, x)
        return outputs if self.output is None else self.output(outputs, targets)

    @property
    def has_tied_head(self) -> bool:
        """Whether the head shares its weights with the module, i.e. with its embedding."""
        return self.output is not None and any(self.output.weight is one for one in self.module.parameters())

    def store_as(self, dtype: torch.dtype) -> None:
        """Convert parameters and inputs to this type; tables among the buffers stay exact."""
        if dtype != torch.float32:
            self._input_dtype = dtype
        for parameter in self.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every buffer by each of its names: buffers that two modules share are separate once they have storage."""
    yield from model.named_buffers(remove_duplicate=False)


def _taken_out(module: nn.Module, path: str) -> Head:
    """Move the linear module at ``path`` to a built-in head, which is returned; ``module`` then returns its input."""
    linear: Any = module.get_submodule(path)
    with torch.device("meta"):
        head = Head(linear.in_features, linear.out_features)
    head.weight = linear.weight
    module.set_submodule(path, nn.Identity())
    return head


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the same random numbers in every process during the body."""
    import random

    import numpy as np

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def build_python(model: PythonModel) -> Built:
    """Call the custom function.

    Raises:
        InfeasibleSpec: it cannot be imported, fails, or returns no module.
    """
    module = call_function(model.model, model.cwd)
    if not isinstance(module, nn.Module):
        raise InfeasibleSpec(f"{model.model} returns a {type(module).__name__}, not a torch.nn.Module")
    return Built(
        module=module,
        layers=model.layers,
        before=model.before,
        after=model.after,
        tensor_parallel=model.tensor_parallel,
        call=_called,
    )


def _called(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def part_of(built: Built, num_layers: int, chunk: Chunk, head: str | None = None) -> ImportedModel:
    """Return the part of the module in ``chunk``; ``head`` computes the loss.

    Raises:
        InfeasibleSpec: its layers differ from those planned for, or it cannot be cut.
    """
    found = len(list(layers_in(built.module, built.layers).children()))
    if found != num_layers:
        raise InfeasibleSpec(
            f"{built.layers} has {found} layers, but had {num_layers} when the sweep was planned; submit the "
            "sweep under a new name"
        )
    # Before it is cut: a stage lacks modules that the plan names.
    no_tensor_parallel = plan_problem(built.module, built.tensor_parallel)
    if not (chunk.is_first and chunk.is_last):
        if problem := pipeline_problem(built.module, built.layers, built.before, built.after):
            raise InfeasibleSpec(f"pp: {problem}")
        cut(built.module, chunk, built.layers, built.before or (), built.after or ())
    return ImportedModel(built, chunk, no_tensor_parallel, head)


def loss_of_python(model: PythonModel) -> Loss:
    """Return the custom loss, in fp32.

    Raises:
        InfeasibleSpec: it cannot be imported.
    """
    function = load_function(model.loss, model.cwd)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        made = function(outputs, targets)
        if not isinstance(made, Tensor) or made.dim():
            shape = f" of shape {tuple(made.shape)}" if isinstance(made, Tensor) else ""
            raise InfeasibleSpec(
                f"{model.loss} returns a {type(made).__name__}{shape}; it must return the mean, a scalar"
            )
        return made.float()

    return loss


# Decoders of the transformers package, built from a configuration without weights.


MISSING = (
    "models of kind huggingface require the transformers package on the nodes and on the host that submits the "
    "sweep; pip install 'transformers>=5'"
)


def build_hugging_face(config: str) -> Built:
    """Build the decoder of this ``config.json`` with transformers' own initial values, without dropout.

    Raises:
        InfeasibleSpec: transformers is not installed, or has no such decoder.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise InfeasibleSpec(f"{MISSING} ({described(error)})") from error
    try:
        content = json.loads(config)
        made = AutoConfig.for_model(content.pop("model_type"), **content)
        drop_nothing(made)
        module = AutoModelForCausalLM.from_config(made, dtype=torch.float32, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except (KeyError, TypeError, ValueError, ImportError, OSError) as error:
        raise InfeasibleSpec(
            f"transformers cannot build a decoder from this config.json: {described(error)}"
        ) from error
    before, after = _ends(module)
    return Built(
        module=module,
        layers=_layers_path(module, made),
        before=before,
        after=after,
        tensor_parallel=tuple(_plan(module)),
        call=_logits,
    )


def drop_nothing(config: Any) -> None:
    """Set every dropout probability to 0, in place: the built-in models train without, and layouts stay comparable."""
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith(("_pdrop", "layerdrop"))):
                setattr(part, name, 0.0)


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    places = {}
    if x.dim() == 3 and not x.is_floating_point():  # packed rows: their positions separate the documents
        x, places["position_ids"] = x.unbind(1)
    logits: Tensor = module(input_ids=x, use_cache=False, **places).logits
    return logits


@torch.no_grad()
def head_of(built: Built, tokens: Tensor) -> str | None:
    """Return the path of the linear module without bias whose outputs for all ``tokens`` are the decoder's logits. None
    if there is none, or if the decoder caps or scales its outputs or changes their type."""
    head: nn.Module = built.module.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear or dict(head.named_parameters()).keys() != {"weight"}:
        return None
    made: list[Tensor] = []

    def narrowed(_module: nn.Module, _args: Any, outputs: Tensor) -> Tensor:
        made.append(outputs.bfloat16())
        return made[-1]

    with head.register_forward_hook(narrowed):
        logits = built.call(built.module, tokens)
    if len(made) != 1 or logits is not made[0] or logits.shape != (*tokens.shape, head.out_features):
        return None
    paths: dict[nn.Module, str] = {one: name for name, one in built.module.named_modules()}
    return paths[head]


def _layers_path(module: nn.Module, config: Any) -> str:
    """Return the path of the decoder's layers: the first list with as many modules as it has layers."""
    number = config.get_text_config().num_hidden_layers
    for name, one in module.named_modules():
        if isinstance(one, nn.ModuleList) and len(one) == number:
            return str(name)
    raise InfeasibleSpec(f"this {config.model_type} model has no list of {number} layers; use workload kind python")


def _ends(module: Any) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Return the modules before and after the layers, from transformers' plan for pipelines; None if it has none."""
    plan = list(getattr(module, "_pp_plan", None) or {})
    layers = [name for name in plan if name.rpartition(".")[2] in ("layers", "h", "blocks")]
    if not layers:
        return None, None
    # The output layer comes first in the plan, because it belongs to the outer model.
    inner = [name for name in plan if "." in name]
    at = inner.index(layers[0])
    outer = [name for name in plan if "." not in name]
    return tuple(inner[:at]), (*inner[at + 1 :], *outer)


def _plan(module: Any) -> Iterator[tuple[str, str]]:
    """Yield transformers' plan for tensor parallelism, without weights that two modules share."""
    ends = [end for end in (module.get_input_embeddings(), module.get_output_embeddings()) if end is not None]
    is_tied = len({id(end.weight) for end in ends}) < len(ends)
    names = dict(module.named_modules())
    for pattern, style in (getattr(module, "tp_plan", None) or {}).items():
        if not (is_tied and names.get(pattern) in ends):
            yield pattern, style


def shape_of(built: Built, config: str, vocab_size: int) -> LlamaModel | None:
    """Return the built-in decoder with as many weights per layer and the same attention; None if there is none.

    The width of its feed-forward follows from the weights of a layer, for any number of matrices.
    """
    if "expert" in config:
        return None  # only a part of a mixture's weights works on each token
    text = built.module.config.get_text_config()  # type: ignore[operator, union-attr]
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    layers = list(built.module.get_submodule(built.layers).children())
    number = sum(parameter.numel() for parameter in layers[0].parameters())
    others = 2 * hidden * hidden + 2 * hidden * (hidden // heads) * kv_heads
    ffn = max(1, round((number - others) / (3 * hidden)))
    if hidden % heads or heads % kv_heads or number <= others:
        return None
    return LlamaModel(
        hidden_size=hidden,
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=int(getattr(text, "intermediate_size", 0)) if _is_gated(layers[0]) else ffn,
        vocab_size=vocab_size,
    )


def _is_gated(layer: nn.Module) -> bool:
    """Whether the feed-forward has a gate, as in Llama."""
    return any("gate_proj" in name for name, _ in layer.named_modules())
