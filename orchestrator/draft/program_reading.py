"""Reads a custom program: the words of its command and variables that trials fill in, and the options to tune."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.cost.usual import built_in_knob
from orchestrator.draft.observed import PROVABLE, Detected, Filled, template, with_value
from orchestrator.draft.static_reading import (
    ScriptOption,
    SourceFile,
    argument_of,
    number_formats,
    present_number,
)
from orchestrator.frameworks.arguments import is_specified, read, read_text, spelled_out, with_settings, write
from orchestrator.space.inside import BATCH_ARGUMENTS

FEW_STEPS = 200
"""Programs that end after fewer steps get ``{steps}``, so that a trial has as many as it needs."""
KNOB_OF_ROLE = {"dtype": "precision", "amp": "precision", "checkpointing": "recompute", "compile": "compile"}
"""The built-in knob that an option of a role stands for."""
_FIXED = dict(zip(("micro_batch_size", "accumulation"), BATCH_ARGUMENTS, strict=True))
_UNTUNED = ("fp16", "torch_compile")
"""Arguments of transformers' Trainer that are worth tuning and not set inside the program."""
_TRAINER_SIZES = {"micro_batch_size": 8, "accumulation": 1}
"""Defaults of transformers' ``TrainingArguments``."""
Knobs = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProgram:
    """What a command and its script's source show."""

    argv: tuple[str, ...]
    """The command, with placeholders for what trials fill in."""
    trial: tuple[str, ...] = ()
    """Arguments that only trials have."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with placeholders."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Configuration files with placeholders, by the word of the command that names them."""
    micro_batch_size: int | None = None
    """Samples of a rank's forward pass in the command; None: not found."""
    accumulation: int | None = None
    """Forward passes of an optimiser step and rank; None: the program has no option for them."""
    num_workers: int | None = None
    """Data-loading processes in the command, if a placeholder stands for them; None: no such option."""
    ep: int | None = None
    """Ranks that share the experts of a layer in the command, if a placeholder stands for them; None: no such option
    was seen to act."""
    is_tuned_by_batch: bool = False
    """Whether the command has placeholders for the batch, so that other sizes can be tried."""
    has_batch_in_code: bool = False
    """Whether micro-batch size and accumulation are arguments of transformers' Trainer that the source sets, so that
    the hook can divide the batch differently."""
    seq_length: int | None = None
    own: Knobs = field(default_factory=dict)
    """Section ``space.own``."""
    roles: frozenset[str] = frozenset()
    """Roles for which it has an option."""
    present: Knobs = field(default_factory=dict)
    """Current values of these, from the command or the program's defaults, if known: section ``baseline.own``.
    Without it the baseline would be tried again as a candidate that spells out its defaults."""
    remarks: tuple[str, ...] = ()
    """What could not be read, and the consequence."""


def read_program(
    argv: tuple[str, ...],
    source: SourceFile | None,
    *,
    is_gpu: bool,
    ranks: int = 1,
    detected: Detected | None = None,
) -> ReadProgram:
    """Read a command on ``ranks`` ranks through the options that the program's source declares; observations of a
    run take precedence."""
    detected = detected or Detected()
    if source is None or source.problem:
        why = source.problem if source is not None else "no Python file was found in the command"
        if not detected.is_seen:
            return ReadProgram(argv=argv, remarks=(f"{why}: its options are unknown",))
        source = None
    by_role = _by_role(argv, source, detected)
    micro, accumulation = _sizes(argv, by_role, source, ranks, detected)
    is_tuned = micro is not None and _is_tuned(argv, by_role, detected)
    filled: dict[str, str] = {}
    if is_tuned:
        filled = _batch_placeholders(by_role, source, detected)
        accumulation = accumulation or 1
    has_batch_in_code = not is_tuned and _has_batch_in_code(source, micro, accumulation)
    num_workers = _workers(argv, by_role, detected)
    if num_workers is not None:
        filled["workers"] = "{num_workers}"
    ep = (present_number(argv, by_role["ep"]) or 1) if "ep" in detected.proofs else None
    if ep is not None:
        filled["ep"] = "{ep}"
    laid = Filled(argv=argv, files=detected.files)
    for role, placeholder in filled.items():
        laid = with_value(laid, by_role[role], placeholder)
    words = laid.argv
    own = _with_roles(dict(_own(argv, by_role, is_gpu=is_gpu)), detected)
    present = dict(_present(argv, by_role, own))
    words = _with_custom_placeholders(words, by_role, own)
    return ReadProgram(
        argv=words,
        trial=_in_trials(words, by_role),
        env=laid.env,
        files={word: template(text) for word, text in laid.files.items() if text != detected.files[word]},
        micro_batch_size=micro,
        accumulation=accumulation,
        num_workers=num_workers,
        ep=ep,
        seq_length=_whole(argv, by_role.get("seq_length")),
        is_tuned_by_batch=is_tuned,
        has_batch_in_code=has_batch_in_code,
        own={_own_name(name, by_role): value for name, value in own.items()},
        present={_own_name(name, by_role): value for name, value in present.items()},
        roles=frozenset(by_role),
        remarks=tuple(
            _remarks(source, by_role, micro, detected, is_tuned=is_tuned or has_batch_in_code, is_gpu=is_gpu)
        ),
    )


def runnable(argv: tuple[str, ...], source: SourceFile | None) -> tuple[str, ...]:
    """The command for a short run: it writes into a separate folder, and logs every step."""
    if source is None or source.problem:
        return argv
    return with_settings(argv, _in_trials(argv, _by_role(argv, source, Detected())))


def _sizes(
    argv: tuple[str, ...],
    by_role: Mapping[str, ScriptOption],
    source: SourceFile | None,
    ranks: int,
    detected: Detected,
) -> tuple[int | None, int | None]:
    """Samples of a micro-batch, and micro-batches of a step on a rank."""
    if detected.is_seen:
        return detected.facts.micro_batch_size, detected.facts.micro_batches
    micro, accumulation = (_size(argv, by_role, role, source) for role in ("micro_batch_size", "accumulation"))
    if source is not None and source.divides_accumulation and accumulation is not None:
        accumulation = max(1, accumulation // ranks)
    return micro, accumulation


def _is_tuned(argv: tuple[str, ...], by_role: Mapping[str, ScriptOption], detected: Detected) -> bool:
    """Whether the batch can be divided differently without changing it."""
    if "micro_batch_size" not in by_role:
        return False
    micro = detected.proofs.get("micro_batch_size")
    return (micro is not None and micro.way == "balanced") or _is_count(argv, by_role.get("accumulation"))


def _has_batch_in_code(source: SourceFile | None, micro: int | None, accumulation: int | None) -> bool:
    """Whether the program's ``TrainingArguments`` decide these sizes: a literal among them that differs from what a run
    showed means that the program makes its batches in another way."""
    if source is None or not source.fixed or source.fixed.get("auto_find_batch_size") or None in (micro, accumulation):
        return False
    sizes = dict(zip(_FIXED.values(), (micro, accumulation), strict=True))
    return all(source.fixed.get(name, size) == size for name, size in sizes.items())


def _batch_placeholders(
    by_role: Mapping[str, ScriptOption], source: SourceFile | None, detected: Detected
) -> dict[str, str]:
    """Placeholder by role: counts over all ranks if the program divides by their number."""
    micro, accumulation = (detected.proofs.get(role) for role in ("micro_batch_size", "accumulation"))
    found = {"micro_batch_size": "{micro_batch_size}"}
    if micro is not None and micro.way == "over_ranks":
        found["micro_batch_size"] = "{total_micro_batch_size}"
    if "accumulation" in by_role and not (micro is not None and micro.way == "balanced"):
        is_total = source is not None and source.divides_accumulation
        is_total = is_total or (accumulation is not None and accumulation.way == "over_ranks")
        found["accumulation"] = "{total_accumulation}" if is_total else "{accumulation}"
    return found


def _workers(argv: tuple[str, ...], by_role: Mapping[str, ScriptOption], detected: Detected) -> int | None:
    option = by_role.get("workers")
    if option is None or option.is_flag:
        return None
    return detected.facts.num_workers if "workers" in detected.proofs else present_number(argv, option)


def _by_role(argv: tuple[str, ...], source: SourceFile | None, detected: Detected) -> dict[str, ScriptOption]:
    """The option of each role: the one that a changed run has shown to have it; else one by its name, unless a run has
    refuted that: one that the command has, then one that is not for evaluation, then the first."""
    found = {role: proof.option for role, proof in detected.proofs.items()}
    taken = {option.names[0] for option in found.values()} | detected.refuted
    options = [*(source.options if source is not None else ()), *detected.options]
    for option in sorted(options, key=lambda one: (not is_specified(argv, argument_of(one)), not one.is_for_training)):
        role, is_guess = option.role, detected.is_seen and option in detected.options
        if role is not None and option.names[0] not in taken and not (is_guess and role in PROVABLE):
            found.setdefault(role, option)
    return found


def _size(
    argv: tuple[str, ...], by_role: Mapping[str, ScriptOption], role: str, source: SourceFile | None
) -> int | None:
    """The number of an option, or what the script sets in code."""
    if role in by_role:
        return _whole(argv, by_role[role])
    if source is None or not source.fixed:
        return None
    value = source.fixed.get(_FIXED[role], _TRAINER_SIZES[role])
    return value if isinstance(value, int) and value > 0 else None


def _remarks(
    source: SourceFile | None,
    by_role: Mapping[str, ScriptOption],
    micro: int | None,
    detected: Detected,
    *,
    is_tuned: bool,
    is_gpu: bool,
) -> Iterator[str]:
    name = source.path.name if source is not None else "the program"
    fixed = source.fixed if source is not None else {}
    untuned = [one for one in (*(() if is_tuned else _FIXED.values()), *_UNTUNED) if one in fixed]
    if untuned:
        names = ", ".join(untuned)
        yield (
            f"{name} sets {names} in code, so trials cannot change them; read them from the command line with "
            "HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()"
        )
    elif (detected.facts.num_optimizers or 0) > 1:
        yield (
            "the program has several optimisers: only steps of the first one are counted, and the batch is one "
            "micro-batch"
        )
    elif "micro_batch_size" not in by_role and not is_tuned:
        what = "that changed the batch size in a run" if detected.is_seen else "with a usual name for the batch size"
        yield (
            f"{name} has no option {what}, so it is not tuned; to tune it, add the options --batch-size and "
            "--accumulation"
        )
    elif micro is not None and not is_tuned:
        yield (
            f"{name} has no option for gradient accumulation, so the batch size is not tuned: another size would "
            "change the training"
        )
    amp = by_role.get("amp")
    if amp is not None and amp.is_flag and not _is_amp_tried(amp, is_gpu):
        yield f"{amp.names[0]}: not tried on CPUs, where automatic mixed precision is rarely faster"
    if detected.is_seen:
        unproven = [
            option.names[0] for role, option in by_role.items() if role in PROVABLE if role not in detected.proofs
        ]
        if unproven:
            yield f"recognized by name only, not verified by a run: {', '.join(unproven)}"
    if source is not None and source.has_batch_norm and is_tuned:
        yield (
            "the model has batch normalisation, whose statistics depend on the micro-batch; the loss gate "
            "checks whether that matters"
        )


def _is_count(argv: tuple[str, ...], option: ScriptOption | None) -> bool:
    """Whether an option takes a number: it has one now, or neither a value nor a default."""
    if option is None or option.is_flag:
        return False
    is_unset = option.default is None and not is_specified(argv, argument_of(option))
    return is_unset or present_number(argv, option) is not None


def _whole(argv: tuple[str, ...], option: ScriptOption | None) -> int | None:
    """As :func:`present_number`, but None for 0 and for flags."""
    return None if option is None or option.is_flag else present_number(argv, option) or None


def _in_trials(words: tuple[str, ...], by_role: Mapping[str, ScriptOption]) -> tuple[str, ...]:
    """Arguments for trials alone: a separate output folder, a log line for every step, and enough steps."""
    by_role = {role: one for role, one in by_role.items() if one.file is None and not one.is_variable}
    values: dict[str, str] = {}
    out = by_role.get("out")
    if out is not None and not out.is_flag and (is_specified(words, argument_of(out)) or out.default is not None):
        values["out"] = "{out}"
    if (every := _whole(words, by_role.get("log_interval"))) is not None and every > 1:
        values["log_interval"] = "1"
    steps = _whole(words, by_role.get("steps"))
    if steps is not None and steps < FEW_STEPS:
        values["steps"] = "{steps}"
    return tuple(
        word for role, value in values.items() for word in spelled_out(words, argument_of(by_role[role]), value)
    )


def _own(argv: tuple[str, ...], by_role: Mapping[str, ScriptOption], *, is_gpu: bool) -> Iterator[tuple[str, Any]]:
    """Options whose usual names show that they change the speed and not the training."""
    amp = by_role.get("amp")
    is_unused = amp is not None and amp.is_flag and not _is_amp_tried(amp, is_gpu) and not _is_on(argv, amp)
    if (dtype := by_role.get("dtype")) is not None and not dtype.is_flag and not is_unused:
        values = number_formats(read_text(argv, argument_of(dtype)) or dtype.default, dtype.choices)
        if values:
            yield dtype.names[0], {"values": values, "memory": "falls"}
    flags = {"amp": "falls", "checkpointing": "falls", **({"compile": None} if is_gpu else {})}
    for role, memory in flags.items():
        option = by_role.get(role)
        if option is None or not option.is_flag or (role == "amp" and not _is_amp_tried(option, is_gpu)):
            continue
        if option.default is True:  # on by default: only its negative spelling changes anything
            if option.negative:
                yield option.negative[0], [False, True]
            continue
        yield option.names[0], _described(option.names[0], role, memory)


KNOB_OF = {"amp": "precision", "checkpointing": "recompute", "compile": "compile"}
"""Built-in knob that a switch of this role stands for."""


def _described(name: str, role: str, memory: str | None) -> Any:
    """The section of a switch, with the built-in knob that it stands for if its name does not show it."""
    section: dict[str, Any] = {"values": [False, True], **({"memory": memory} if memory else {})}
    if built_in_knob(name, True) is None:
        section["role"] = KNOB_OF[role]
    return section if len(section) > 1 else section["values"]


def _with_roles(own: Knobs, detected: Detected) -> dict[str, Any]:
    """The knobs, with the built-in knob that each stands for if a changed run has shown it."""
    found = dict(own)
    for role, knob in KNOB_OF_ROLE.items():
        option = detected.proofs[role].option if role in detected.proofs else None
        for name in (option.names[0], *option.negative) if option is not None else ():
            if name in found:
                section = found[name]
                found[name] = {**(section if isinstance(section, Mapping) else {"values": section}), "role": knob}
    return found


def _is_amp_tried(option: ScriptOption, is_gpu: bool) -> bool:
    """fp16 autocast needs a GPU; bfloat16 works on CPUs."""
    return is_gpu or "bf16" in option.names[0]


def _is_on(argv: tuple[str, ...], option: ScriptOption) -> bool:
    """Whether a switch is on today, by the command or by default."""
    return bool(read(argv, argument_of(option))) if is_specified(argv, argument_of(option)) else option.default is True


def _own_name(name: str, by_role: Mapping[str, ScriptOption]) -> str:
    """What the sweep file calls a custom knob: its option; an identifier where a placeholder stands for the value."""
    if any(one.is_variable and one.names[0] == name for one in by_role.values()):
        return f"${name}"
    is_assigned = any(one.is_assignment and one.names[0] == name for one in by_role.values())
    return name.lstrip("-").replace("-", "_").replace(".", "_") if is_assigned else name


def _with_custom_placeholders(
    words: tuple[str, ...], by_role: Mapping[str, ScriptOption], own: Knobs
) -> tuple[str, ...]:
    """The command with placeholders for custom knobs that are assignments, which have no other way in."""
    for option in by_role.values():
        if option.is_assignment and option.names[0] in own:
            words = write(words, argument_of(option), f"{{{_own_name(option.names[0], by_role)}}}")
    return words


def _present(
    argv: tuple[str, ...], by_role: Mapping[str, ScriptOption], own: Knobs
) -> Iterator[tuple[str, str | int | bool]]:
    """Today's values of custom knobs, if they are among those to try."""
    options = {name: option for option in by_role.values() for name in (option.names[0], *option.negative)}
    for name, section in own.items():
        option, values = options[name], section["values"] if isinstance(section, Mapping) else section
        if option.is_variable:
            continue
        if option.is_flag:
            is_on = _is_on(argv, option)
            yield name, (not is_on) if name in option.negative else is_on
            continue
        text = read_text(argv, argument_of(option))
        now = str(option.default if text is None else text)
        yield from ((name, value) for value in values if str(value) == now)


def worker_counts(present: int, cores: int) -> list[int]:
    """Numbers of loader workers of a rank to try: the present one, none, and some for its share of the cores."""
    more = (4, 8) if cores >= 8 else (2, 4) if cores >= 4 else (2,)
    return sorted({present, 0, *more})


def usual_variables(*, is_gpu: bool, cores: int) -> Knobs:
    """Tunable in any program: environment variables."""
    if is_gpu:
        return {"$PYTORCH_CUDA_ALLOC_CONF": ["backend:native", "expandable_segments:True"]}
    return {"$OMP_NUM_THREADS": [1, max(2, cores)]}
