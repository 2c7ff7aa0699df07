"""torchtitan's configuration as Python text: writes the module of an export, and reads functions of a user's module
without running them.

Since torchtitan 0.3, a configuration is a Python function that returns a ``Trainer.Config``; the command line names
module and function. Supported are calls of ``*.Config`` constructors with literals, functions of the same file that
they are based on, and assignments like ``config.training.steps = 10``. Computed values are unknown.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from trials.files import read_regular

FILE, FUNCTION = "tune_cluster_recipe.py", "train"
ACTIVATION_CHECKPOINT = "activation_checkpoint"
NUM_EXPERTS = "model_spec.num_experts"
SELECTED = "selected"
"""Policy of exports that recompute some layers, or modules of them."""
_FULL, _SELECTED = "FullAC.Config", "SelectedLayers.Config"
_CONSTRUCTORS = {
    "model_spec": "llama",
    "training": "TrainingConfig",
    "parallelism": "ParallelismConfig",
    "compile": "CompileConfig",
    "optimizer": "default_adamw",
    "lr_scheduler": "LRSchedulersContainer.Config",
    "dataloader": "HuggingFaceTextDataLoader.Config",
    "loss": "cross_entropy",
    "debug": "DebugConfig",
}
"""Constructor of each part of a ``Trainer.Config``."""

_HEAD = '''\
"""Made by tune-cluster for torchtitan 0.3: {command}"""
'''

_BODY = '''
from dataclasses import replace
from functools import partial

from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, model_registry
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.trainer import Trainer


def llama(
    *, dim, n_layers, n_heads, n_kv_heads, hidden_dim, vocab_size, max_seq_len, rope_theta, norm_eps, float8=False
):
    """A Llama of this shape, trained as torchtitan trains its own; ``float8`` converts the linear modules of layers."""
    weight = {"weight": partial(nn.init.trunc_normal_, std=0.02)}
    residual = {"weight": partial(nn.init.trunc_normal_, std=0.02 / (2 * n_layers) ** 0.5)}

    def norm():
        return RMSNorm.Config(normalized_shape=dim, eps=norm_eps, param_init={"weight": nn.init.ones_})

    def layer():
        rope = ComplexRoPE.Config(dim=dim // n_heads, max_seq_len=max_seq_len, theta=rope_theta, scaling="none")
        return Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=dim,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                wqkv_param_init=weight,
                wo_param_init=residual,
                inner_attention=get_attention_config("flex"),
                rope=rope,
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=hidden_dim, w1_param_init=weight, w2w3_param_init=residual
            ),
        )

    model = Llama3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=weight),
        norm=norm(),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=weight),
        layers=[layer() for _ in range(n_layers)],
    )
    if float8:
        converter = Float8LinearConverter.Config(recipe_name="tensorwise", filter_fqns=["lm_head"])
        model = converter.build().convert(model)
    return replace(model_registry("debugmodel"), flavor="tune-cluster", model=model)


def cross_entropy(*, num_chunks, global_vocab_size):
    """The loss of all logits, or of a part of the positions at a time."""
    loss = CrossEntropyLoss.Config(global_vocab_size=global_vocab_size)
    return loss if num_chunks == 1 else ChunkedLossWrapper.Config(num_chunks=num_chunks, loss_fn=loss)


'''

_MIXTURE = '''\
def mixture(
    *,
    num_experts,
    top_k,
    expert_dim,
    shared_dim,
    n_dense_layers,
    score_func,
    route_norm,
    load_balance_coeff,
    **dense,
):
    """The same with experts instead of the feed-forward of all layers but the first ``n_dense_layers``."""
    from torchtitan.models import qwen3
    from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config

    weight = {"weight": partial(nn.init.trunc_normal_, std=0.02)}
    inner = partial(nn.init.trunc_normal_, std=0.02)
    outer = partial(nn.init.trunc_normal_, std=0.02 / (2 * dense["n_layers"]) ** 0.5)
    dim, plain = dense["dim"], llama(**dense).model

    def experts():
        shared = make_ffn_config(
            dim=dim, hidden_dim=shared_dim, w1_param_init=weight, w2w3_param_init={"weight": outer}
        )
        return make_moe_config(
            num_experts=num_experts,
            router=make_router_config(
                dim=dim,
                num_experts=num_experts,
                gate_param_init=weight,
                top_k=top_k,
                score_func=score_func,
                route_norm=route_norm,
            ),
            routed_experts=make_routed_experts_config(
                dim=dim,
                hidden_dim=expert_dim,
                num_experts=num_experts,
                top_k=top_k,
                param_init={"w1_EFD": inner, "w2_EDF": outer, "w3_EFD": inner},
                comm_backend="standard",
            ),
            shared_experts=shared if shared_dim else None,
            load_balance_coeff=load_balance_coeff,
        )

    def layer(number, block):
        is_dense = number < n_dense_layers
        return qwen3.Qwen3TransformerBlock.Config(
            attention_norm=block.attention_norm,
            ffn_norm=block.ffn_norm,
            attention=block.attention,
            feed_forward=block.feed_forward if is_dense else None,
            moe=None if is_dense else experts(),
        )

    model = qwen3.Qwen3Model.Config(
        dim=dim,
        vocab_size=plain.vocab_size,
        tok_embeddings=plain.tok_embeddings,
        norm=plain.norm,
        lm_head=plain.lm_head,
        layers=[layer(number, block) for number, block in enumerate(plain.layers)],
    )
    return replace(qwen3.model_registry("debugmodel"), flavor="tune-cluster", model=model)


'''

_SELECTED_LAYERS = '''\
class SelectedLayers(FullAC):
    """Recompute the layers in ``full``, and modules of other layers: numbers of layers by the module's name."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        full: list[int]
        modules: dict[str, list[int]]

    def _wrap_block(self, module, *, base_fqn=None):
        layer = int(base_fqn.rpartition(".")[2])
        if layer in self.config.full:
            return super()._wrap_block(module)
        for name, layers in self.config.modules.items():
            if layer in layers:
                setattr(module, name, super()._wrap_block(getattr(module, name)))
        return module


'''


def module_text(settings: Mapping[str, Any], comments: Iterable[str], command: str) -> str:
    """The module's text."""
    is_mixture, policy = NUM_EXPERTS in settings, settings[ACTIVATION_CHECKPOINT]
    constructors = {**_CONSTRUCTORS, "model_spec": "mixture" if is_mixture else "llama"}
    parts = [
        f"        {part}={_call(constructor, _of_part(settings, part))},\n"
        for part, constructor in constructors.items()
        if _of_part(settings, part)
    ]
    policies = {"full": f"{_FULL}()", SELECTED: _call(_SELECTED, _of_part(settings, ACTIVATION_CHECKPOINT))}
    parts.append(f"        {ACTIVATION_CHECKPOINT}={policies.get(policy, 'None')},\n")
    head = _HEAD.format(command=command) + "".join(f"\n{line}" for line in comments)
    body = f"def {FUNCTION}() -> Trainer.Config:\n    return Trainer.Config(\n{''.join(parts)}    )\n"
    extra = (_MIXTURE if is_mixture else "") + (_SELECTED_LAYERS if policy == SELECTED else "")
    frame = _BODY.replace("import replace", "import dataclass, replace") if policy == SELECTED else _BODY
    return f"{head}\n{frame}{extra}{body}".replace("\n\n\nfrom dataclasses", "\n\nfrom dataclasses")


def module_settings(text: str) -> dict[str, Any]:
    """The settings of a module from :func:`module_text`, also if values were changed in it.

    Raises:
        ConfigError: it does not have that form.
    """
    try:
        config = _config(ast.parse(text))
        found: dict[str, Any] = {}
        for keyword in config.keywords:
            found |= _read_part(str(keyword.arg), keyword.value)
    except (SyntaxError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot read {FILE}: {error}", remedy="Re-export the configuration.") from None
    return found


def _call(constructor: str, values: Mapping[str, Any]) -> str:
    lines = "".join(f"            {name}={value!r},\n" for name, value in values.items())
    return f"{constructor}(\n{lines}        )"


def _of_part(settings: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {name.partition(".")[2]: value for name, value in settings.items() if name.startswith(part + ".")}


def _config(module: ast.Module) -> ast.Call:
    """The expression that the configuration function returns."""
    function = next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION)
    returned = function.body[-1]
    if not isinstance(returned, ast.Return) or not isinstance(returned.value, ast.Call):
        raise TypeError(f"{FUNCTION}() does not return Trainer.Config(...)")
    return returned.value


def _read_part(part: str, value: ast.expr) -> dict[str, Any]:
    policy = {f"{_FULL}()": "full", "None": "none"}.get(ast.unparse(value))
    if part == ACTIVATION_CHECKPOINT and policy is not None:
        return {part: policy}
    if not isinstance(value, ast.Call):
        raise TypeError(f"{part} is not a call")
    found = {f"{part}.{keyword.arg}": ast.literal_eval(keyword.value) for keyword in value.keywords}
    return {part: SELECTED, **found} if part == ACTIVATION_CHECKPOINT else found


# Functions of a user's module.

UNKNOWN = "unknown"
"""A value that is computed, or set conditionally."""
ELSEWHERE = "*"
"""Entry in settings that are based on a function of another file: settings that they lack are unknown, not default."""
MODEL = "model_spec"
_POLICIES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory-budget"}
_MAX_BYTES = 1 << 20


def find(module: str, cwd: str, python: str) -> str | None:
    """Absolute path of the file with the functions of ``--module``: below ``cwd``, or in the torchtitan of the
    program's Python."""
    short = "." not in module and Path(module).name == module
    names = [f"{module}.config_registry", module]
    if short:
        names = [f"torchtitan.models.{module}.config_registry", *names]
    for root in (Path(cwd), *_site_packages(cwd, python)):
        for name in names:
            path = root / (name.replace(".", "/") + ".py")
            if path.is_file() and path.stat().st_size < _MAX_BYTES:
                return str(path)
    return None


def _site_packages(cwd: str, python: str) -> list[Path]:
    """Package folders of that interpreter, and of ours."""
    found = shutil.which(python, path=None) if "/" not in python else str(Path(cwd, python))
    folders = sorted(Path(found).parent.parent.glob("lib/python3*/site-packages")) if found else []
    ours = importlib.util.find_spec("torchtitan")
    return [*folders, *([Path(ours.origin).parent.parent] if ours and ours.origin else [])]


def settings_of(text: str, function: str, base: str = "") -> Mapping[str, Any] | None:
    """Settings by dotted name of a function in this text, which may be based on functions of the text ``base``; None if
    unknown."""
    try:
        nodes = [*ast.parse(base).body, *ast.parse(text).body]
    except SyntaxError:
        return None
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    return _returned(functions, function, ())


def base_of(path: str, cwd: str, python: str) -> str | None:
    """Absolute path of the registry whose functions a file imports as a base; None without one."""
    try:
        nodes = ast.parse(read_regular(Path(path))).body
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    modules = (node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module)
    names = (module for module in modules if module.endswith(".config_registry"))
    return next((found for name in names if (found := find(name, cwd, python))), None)


def _returned(functions: Mapping[str, ast.FunctionDef], name: str, above: tuple[str, ...]) -> dict[str, Any] | None:
    if name not in functions or name in above:
        return None
    variables: dict[str, Any] = {}
    for statement in functions[name].body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=variable)], value=value):
                variables[variable] = _value(value, functions, variables, (*above, name))
            case ast.Assign(targets=[ast.Attribute() as target], value=value):
                _assign(variables, ast.unparse(target), _value(value, functions, variables, (*above, name)))
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=parts)) if all(
                isinstance(target, ast.Attribute) for target in targets
            ):
                for goal, part in zip(targets, parts, strict=False):
                    _assign(variables, ast.unparse(goal), _value(part, functions, variables, (*above, name)))
            case ast.Return(value=value) if value is not None:
                found = _value(value, functions, variables, (*above, name))
                return found if isinstance(found, dict) else None
            case ast.Expr() | ast.Assert() | ast.Import() | ast.ImportFrom():
                continue
            case _:
                _forget(statement, variables)
    return None


def _value(
    node: ast.expr, functions: Mapping[str, ast.FunctionDef], variables: Mapping[str, Any], above: tuple[str, ...]
) -> Any:
    """A literal, the settings of a part by dotted name, or :data:`UNKNOWN`."""
    if isinstance(node, ast.Name):
        return variables.get(node.id, UNKNOWN)
    if not isinstance(node, ast.Call):
        try:
            return ast.literal_eval(node)
        except ValueError:
            return UNKNOWN
    called = ast.unparse(node.func)
    if called in functions and not node.args and not node.keywords:
        return _returned(functions, called, above) or UNKNOWN
    if isinstance(node.func, ast.Name) and not node.args and not node.keywords:
        return {ELSEWHERE: UNKNOWN}
    if called == "model_registry":
        return ast.literal_eval(node.args[0]) if node.args and isinstance(node.args[0], ast.Constant) else UNKNOWN
    owner = called.removesuffix(".Config")
    if owner in _POLICIES:
        return _POLICIES[owner]
    if not called.endswith("Config"):
        return UNKNOWN
    made: dict[str, Any] = {}
    for keyword in node.keywords:
        _assign_part(made, str(keyword.arg), _value(keyword.value, functions, variables, above))
    return made


def _assign(variables: dict[str, Any], target: str, value: Any) -> None:
    owner, _, path = target.partition(".")
    if isinstance(variables.get(owner), dict):
        _assign_part(variables[owner], path, value)


def _assign_part(made: dict[str, Any], path: str, value: Any) -> None:
    for known in [known for known in made if known == path or known.startswith(f"{path}.")]:
        del made[known]
    if isinstance(value, dict):
        made |= {f"{path}.{name}": part for name, part in value.items()}
    else:
        made[path] = "none" if path == ACTIVATION_CHECKPOINT and value is None else value


def _forget(statement: ast.stmt, variables: dict[str, Any]) -> None:
    """Mark everything that a branch or loop assigns as unknown."""
    for node in ast.walk(statement):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute):
                _assign(variables, ast.unparse(target), UNKNOWN)
            elif isinstance(target, ast.Name):
                variables[target.id] = UNKNOWN
