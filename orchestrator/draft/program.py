"""A program of no framework that is known: which words of its command trials fill in, and what of it may be tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.draft.source import ScriptOption, SourceFile
from orchestrator.recipes.arguments import Argument, is_given, read_text, write

FEW_STEPS = 200
"""Programs that end sooner by themselves are told how many steps a trial needs."""
NUMBER_FORMATS = (
    ("float32", "bfloat16"),
    ("fp32", "bf16"),
    ("32-true", "bf16-mixed"),
    ("32", "bf16-mixed"),
    ("no", "bf16"),
    ("full", "bf16"),
    ("fp16", "bf16"),
    ("float16", "bfloat16"),
)
"""Spellings of a number format and of the 16-bit one to try beside it."""
Knobs = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProgram:
    """What a command and its script's source tell of each other."""

    argv: tuple[str, ...]
    """The command, with placeholders for what trials fill in."""
    micro_batch_size: int | None = None
    """Samples of a rank's forward pass, as the command says; None: not found."""
    accumulation: int | None = None
    """Forward passes of an optimiser step; None: the program has no option for them."""
    is_tuned_by_batch: bool = False
    """Whether the command has placeholders for the batch, so that other sizes can be tried."""
    seq_length: int | None = None
    own: Knobs = field(default_factory=dict)
    """Section ``space.own``."""
    present: Knobs = field(default_factory=dict)
    """Values that these have today, by the command or by the program's defaults, as far as known: section
    ``baseline.own``, without which the baseline would be tried again as a candidate that only says its defaults."""
    remarks: tuple[str, ...] = ()
    """What could not be read, and what that means."""


def read_program(
    argv: tuple[str, ...], source: SourceFile | None, *, is_gpu: bool, cores: int, ranks: int = 1
) -> ReadProgram:
    """What can be told of a program by the options that its source declares, on as many ranks."""
    if source is None or source.problem:
        why = source.problem if source is not None else "no Python file was found in the command"
        return ReadProgram(argv=argv, own=_usual(is_gpu, cores), remarks=(f"{why}: its options are not known",))
    by_role: dict[str, ScriptOption] = {}
    for option in source.options:
        if option.role is not None:
            by_role.setdefault(option.role, option)
    micro = _whole(argv, by_role.get("micro_batch_size"))
    accumulation = _whole(argv, by_role.get("accumulation"))
    words, remarks = argv, []
    is_shared = source.divides_accumulation and ranks > 1
    if is_shared and accumulation is not None:
        accumulation = max(1, accumulation // ranks)
        remarks.append(f"{source.path.name} shares its accumulation out over the ranks: its batch stays as it is")
    elif micro is not None and accumulation is not None:
        words = write(words, _argument(by_role["micro_batch_size"]), "{micro_batch_size}")
        words = write(words, _argument(by_role["accumulation"]), "{accumulation}")
    elif micro is not None:
        remarks.append(
            f"{source.path.name} has no option for gradient accumulation: its batch stays as it is: another "
            "size would be another training"
        )
    else:
        remarks.append(f"{source.path.name} has no option with a usual name for the batch size: it stays as it is")
    words = _out_and_steps(words, by_role)
    own = dict(_own(argv, by_role, is_gpu=is_gpu, cores=cores))
    is_tuned = micro is not None and accumulation is not None and not is_shared
    return ReadProgram(
        argv=words,
        micro_batch_size=micro,
        accumulation=accumulation,
        seq_length=_whole(argv, by_role.get("seq_length")),
        is_tuned_by_batch=is_tuned,
        own=own or ({} if is_tuned else _usual(is_gpu, cores)),
        present=dict(_present(argv, by_role, own)),
        remarks=tuple(remarks),
    )


def _argument(option: ScriptOption) -> Argument:
    takes: Literal["assignment", "flag", "value"]
    takes = "assignment" if option.is_assignment else "flag" if option.is_flag else "value"
    return Argument(name=option.names[0], aliases=option.names[1:], takes=takes)


def _whole(argv: tuple[str, ...], option: ScriptOption | None) -> int | None:
    """An option's number as the command says it, else its default."""
    if option is None or option.is_flag:
        return None
    text = read_text(argv, _argument(option))
    value = option.default if text is None else text
    return int(value) if str(value).isdigit() and int(value) else None


def _out_and_steps(words: tuple[str, ...], by_role: Mapping[str, ScriptOption]) -> tuple[str, ...]:
    """The command with a folder of the trial's own for what it writes, a line for every step, and steps enough."""
    out = by_role.get("out")
    if out is not None and not out.is_flag and (is_given(words, _argument(out)) or out.default is not None):
        words = write(words, _argument(out), "{out}")
    if (every := _whole(words, by_role.get("log_interval"))) is not None and every > 1:
        words = write(words, _argument(by_role["log_interval"]), "1")
    steps = _whole(words, by_role.get("steps"))
    if steps is not None and steps < FEW_STEPS:
        words = write(words, _argument(by_role["steps"]), "{steps}")
    return words


def _own(
    argv: tuple[str, ...], by_role: Mapping[str, ScriptOption], *, is_gpu: bool, cores: int
) -> Iterator[tuple[str, Any]]:
    """Options by whose usual names it can be told that they change the speed and not the training."""
    if (dtype := by_role.get("dtype")) is not None and not dtype.is_flag:
        values = _number_formats(read_text(argv, _argument(dtype)) or dtype.default, dtype.choices)
        if values:
            yield dtype.names[0], {"values": values, "memory": "falls"}
    flags = {"amp": "falls", "checkpointing": "falls", **({"compile": None} if is_gpu else {})}
    for role, memory in flags.items():
        option = by_role.get(role)
        if (
            option is None
            or not option.is_flag
            or option.is_assignment
            or (role == "amp" and not is_gpu and "bf16" not in option.names[0])
        ):
            continue
        yield option.names[0], {"values": [False, True], "memory": memory} if memory else [False, True]
    if (workers := by_role.get("workers")) is not None and not workers.is_flag:
        given = read_text(argv, _argument(workers))
        text = str(workers.default if given is None else given)
        now = int(text) if text.isdigit() else 0
        yield workers.names[0], sorted({now, 0, 2 if cores <= 4 else 4})


def _present(
    argv: tuple[str, ...], by_role: Mapping[str, ScriptOption], own: Knobs
) -> Iterator[tuple[str, str | int | bool]]:
    """Today's values of own knobs, where they are among those to try."""
    options = {option.names[0]: option for option in by_role.values()}
    for name, section in own.items():
        option, values = options[name], section["values"] if isinstance(section, Mapping) else section
        if option.is_flag:
            yield name, is_given(argv, _argument(option))
            continue
        text = read_text(argv, _argument(option))
        said = str(option.default if text is None else text)
        yield from ((name, value) for value in values if str(value) == said)


def _number_formats(present: Any, choices: tuple[Any, ...]) -> list[str]:
    """The present number format and the 16-bit one beside it, as the program spells them."""
    for name, half in NUMBER_FORMATS:
        if str(present) == name and (not choices or half in choices):
            return [name, half]
    return []


def _usual(is_gpu: bool, cores: int) -> Knobs:
    """What can be tuned of any program: variables of its environment."""
    if is_gpu:
        return {"$PYTORCH_CUDA_ALLOC_CONF": ["backend:native", "expandable_segments:True"]}
    return {"$OMP_NUM_THREADS": [1, max(2, cores)]}
