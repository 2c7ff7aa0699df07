"""A training script's source, read without running it: its options, and the line in which it says how far it is."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.recipes.launchers import program_of

MAX_BYTES = 1 << 20
"""Longer sources are none that people wrote."""
ROLES = {
    "micro_batch_size": "bs b batch batch_size micro_batch micro_batch_size mbs micro_bs train_batch_size "
    "per_device_batch_size per_device_train_batch_size device_batch_size batch_size_per_gpu batch_size_per_device "
    "train_micro_batch_size_per_gpu local_batch_size",
    "accumulation": "accum accumulation accumulate grad_accum gradient_accumulation gradient_accumulation_steps "
    "grad_accumulation grad_accum_steps accumulation_steps accum_steps accum_iter accumulate_grad_batches update_freq",
    "dtype": "dtype precision mixed_precision amp_dtype compute_dtype",
    "amp": "amp use_amp bf16 fp16 half autocast",
    "workers": "workers num_workers dataloader_num_workers data_workers nworkers j",
    "compile": "compile torch_compile use_compile torchcompile",
    "checkpointing": "checkpointing gradient_checkpointing grad_checkpointing grad_checkpoint activation_checkpointing "
    "gradient_checkpoint recompute use_checkpoint use_checkpointing remat",
    "seq_length": "seq_length seq_len sequence_length block_size context_length max_seq_len max_seq_length bptt",
    "steps": "steps max_steps num_steps train_steps total_steps iters max_iters num_iters iterations num_iterations "
    "train_iters max_iterations n_steps",
    "log_interval": "log_interval log_every log_freq log_steps logging_steps log_iter print_freq print_every "
    "print_interval print_steps log_every_n_steps",
    "out": "out out_dir output output_dir save_dir checkpoint_dir ckpt_dir save_path log_dir logdir work_dir "
    "result_dir results_dir",
}
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names.split()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOption:
    """An option that a script declares for its command line."""

    names: tuple[str, ...]
    """As declared, the first long one first: ``--batch-size``, ``-b``."""
    default: Any = None
    choices: tuple[Any, ...] = ()
    is_flag: bool = False
    """Whether it takes no value."""
    is_assignment: bool = False
    """Whether it is written as one word, ``--name=value``, and no other way."""

    @property
    def role(self) -> str | None:
        """What it is by its usual names, a key of :data:`ROLES`."""
        for name in self.names:
            if found := _ROLE_OF.get(name.lstrip("-").replace("-", "_").replace(".", "_").lower()):
                return found
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """What a script's source tells."""

    path: Path
    options: tuple[ScriptOption, ...] = ()
    modules: frozenset[str] = frozenset()
    """Top-level packages that it imports."""
    log_pattern: str | None = None
    """A regular expression for the line that it prints per step; None: no such line was found."""
    divides_accumulation: bool = False
    """Whether it shares its accumulation steps out over the ranks, as nanoGPT does."""
    problem: str = ""
    """Why it could not be read; empty where it was."""


def find_script(argv: Sequence[str], cwd: Path) -> Path | None:
    """The Python file that a command runs; None where that cannot be told."""
    program = program_of(tuple(argv))
    if program.module is not None:
        module = cwd.joinpath(*program.module.split("."))
        return next((path for path in (module.with_suffix(".py"), module / "__main__.py") if path.is_file()), None)
    return path if program.script is not None and (path := cwd / program.script).is_file() else None


def read_source(path: Path) -> SourceFile:
    """What the script's source tells; with the reason where it cannot be read."""
    from orchestrator.draft.log_line import log_pattern

    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > MAX_BYTES:
            return SourceFile(path=path, problem=f"{path.name} is longer than {MAX_BYTES >> 20} MiB")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        return SourceFile(path=path, problem=f"{path.name} cannot be read: {error}")
    options = tuple(_options(tree)) or tuple(_assignments(tree, text))
    return SourceFile(path=path, options=options, modules=frozenset(_modules(tree)), log_pattern=log_pattern(tree))


def _modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _options(tree: ast.AST) -> Iterator[ScriptOption]:
    """Options declared with argparse's ``add_argument`` or click's ``option``, in the order of the source."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if function not in ("add_argument", "option"):
            continue
        names = [name for name in map(_constant, call.args) if isinstance(name, str) and name.startswith("-")]
        if names:
            yield _option(sorted(names, key=lambda name: not name.startswith("--")), call)


def _assignments(tree: ast.Module, text: str) -> Iterator[ScriptOption]:
    """Variables of a script that runs a ``configurator.py``, as nanoGPT's do: ``--name=value`` sets each of them."""
    if "configurator.py" not in text:
        return
    for name, value in constants(tree).items():
        yield ScriptOption(names=(f"--{name}",), default=value, is_assignment=True)


def constants(tree: ast.Module) -> dict[str, Any]:
    """Values of the variables that a module gives a literal, at its top level."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _constant(node.value)
            if isinstance(value, str | int | float):
                found[node.targets[0].id] = value
    return found


def with_settings(source: SourceFile, argv: Sequence[str], cwd: Path) -> SourceFile:
    """The source with defaults as further Python files of the command set them, as configurators read them."""
    if not any(option.is_assignment for option in source.options):
        return source
    set_there: dict[str, Any] = {}
    for word in argv:
        if word.endswith(".py") and not word.startswith("-") and (cwd / word).resolve() != source.path.resolve():
            try:
                set_there |= constants(ast.parse((cwd / word).read_text(encoding="utf-8")))
            except (OSError, ValueError, SyntaxError):
                continue
    options = tuple(replace(one, default=set_there.get(one.names[0][2:], one.default)) for one in source.options)
    return replace(source, options=options)


def _option(names: list[str], call: ast.Call) -> ScriptOption:
    said = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    action, default = _constant(said.get("action")), _constant(said.get("default"))
    is_flag = action in ("store_true", "store_false") or _constant(said.get("is_flag")) is True
    choices = said.get("choices")
    values = tuple(map(_constant, choices.elts)) if isinstance(choices, ast.List | ast.Tuple | ast.Set) else ()
    return ScriptOption(names=tuple(names), default=default, choices=values, is_flag=is_flag)


def _divides_accumulation(node: ast.AST) -> bool:
    if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.FloorDiv):
        return False
    return isinstance(node.target, ast.Name) and _ROLE_OF.get(node.target.id) == "accumulation"


def _constant(node: ast.AST | None) -> Any:
    """The value of a literal, or of a product of such; None for everything else."""
    if node is None:
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = _constant(node.left), _constant(node.right)
        return math.prod(factors) if all(isinstance(factor, int | float) for factor in factors) else None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
