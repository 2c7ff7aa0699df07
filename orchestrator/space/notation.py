"""What candidates are called: knob values as short text, the short notation, flat descriptions and differences.

Short names like ``pp2 z2x8 mbs1 full4 O1-bf16`` are written by the table of signs, so that none can hold a sign that
the legend does not explain.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.candidate_table import FIELDS, CandidateTable, Codes
from orchestrator.space.file_types import ALL_LAYERS, LayerCount, RecomputeChoice, StageSplit, even_split
from orchestrator.space.knobs import INHERITED, KNOBS, own_text
from trials.files import digest
from trials.spec import (
    Candidate,
    Counts,
    Kernels,
    Layout,
    Loader,
    LoaderTuning,
    LossScale,
    Offload,
    OwnChoice,
    Precision,
    Recompute,
)

# Knob values as short text: for parameters, tables and messages

DTYPE_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_MAX_LIST_CHARS = 40


def plain(value: Any) -> str | int | float | bool:
    """A knob value as a scalar, different for different values: ``full:4``, ``O1-bf16``."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Precision):
        return precision_text(value)
    if isinstance(value, Recompute | RecomputeChoice):
        return recompute_text(value)
    if isinstance(value, StageSplit):
        return value.kind if value.kind == "even" else f"{value.kind} {counts_text(value.rows)}"
    if value is None:
        return "manual"
    if isinstance(value, LoaderTuning):
        return "auto" if value == LoaderTuning() else f"auto:{value.tuning_steps}x{value.max_workers}"
    if isinstance(value, tuple):
        return steps_text(value)
    raise TypeError(f"not a knob value: {value!r}")


def plain_knob(name: str, value: Any, candidate: Candidate) -> str | int | float | bool:
    """The value as :func:`plain` writes it, shorter where the rest of the candidate explains it."""
    if name == "stage_layers":
        return stage_layers_text(candidate.layout)
    return recompute_text(value, candidate.layout) if name == "recompute" else plain(value)


def precision_text(precision: Precision) -> str:
    """``O0``, ``O1-bf16``, ``O1-bf16+softmax-linear``: operators forced to 16 bits and to fp32; a loss scale other
    than the default adds a tag derived from its numbers, and so do long lists."""
    if precision.level == "O0":
        return "O0"
    level = precision.level if precision.level == "O1-fp8" else f"{precision.level}-{DTYPE_SHORT[precision.dtype]}"
    return f"{level}{lists_text(precision)}{loss_scale_text(precision)}"


def lists_text(precision: Precision) -> str:
    """``+softmax-linear``: operators forced to 16 bits and to fp32; long lists as a tag."""
    lists = "".join(f"+{name}" for name in precision.white) + "".join(f"-{name}" for name in precision.black)
    return f"+lists~{digest([precision.white, precision.black])[:6]}" if len(lists) > _MAX_LIST_CHARS else lists


def loss_scale_text(precision: Precision) -> str:
    """A tag derived from the numbers of a loss scale other than the default; else empty."""
    custom = precision.loss_scale not in (None, LossScale())
    return f"~{digest(precision.loss_scale)[:6]}" if custom else ""


def counts_text(counts: Counts) -> str:
    """``20,8``; chunks are separated by a slash, and three or more of a kind are counted: ``11x3,8/10,11x3``."""
    return "/".join(",".join(_runs(map(str, row))) for row in counts)


def _runs(words: Iterable[str]) -> Iterator[str]:
    for word, group in itertools.groupby(words):
        number = len(list(group))
        yield from [f"{word}x{number}"] if number > 2 else [word] * number


def recompute_text(value: Recompute | RecomputeChoice, layout: Layout | None = None, separator: str = ":") -> str:
    """``none``, ``full:4``, ``full:13,5 ~feed_forward\\.mul:40 comm:4,0``.

    A single number is that of all layers, where ``layout`` says how many there are. A question mark stands before
    numbers that do not fit the layout.
    """
    if isinstance(value, Recompute):
        select = tuple((part.pattern, part.num_layers) for part in value.selective)
        value = RecomputeChoice(full=value.full, select=select, communication=value.communication)
    named = [("full", value.full), *((_pattern_text(p), count) for p, count in value.select)]
    named.append(("comm", value.communication))
    return " ".join(f"{name}{separator}{_count_text(count, layout)}" for name, count in named if count) or "none"


def _count_text(count: LayerCount, layout: Layout | None) -> str:
    if isinstance(count, int):
        return "all" if count == ALL_LAYERS else str(count)
    if layout is None:
        return counts_text(count)
    if layout.pp > 1 and count == layout.stage_layers:
        return str(sum(map(sum, count)))
    fits = [len(row) for row in count] == [layout.pp] * layout.num_virtual_stages
    return counts_text(count) if fits else f"?{counts_text(count)}"


def _pattern_text(pattern: str) -> str:
    """Kept readable where it cannot be mistaken for what stands around it."""
    is_simple = len(pattern) <= _MAX_LIST_CHARS and re.fullmatch(r"[^\s:#~][^\s:]*", pattern)
    return f"~{pattern}" if is_simple else f"~#{digest(pattern)[:8]}"


def stage_layers_text(layout: Layout) -> str:
    """``even``, or the layers of every stage."""
    counts = layout.stage_layers
    if layout.pp == 1:
        return "even"
    total = sum(map(sum, counts))
    even = even_split(total, layout.pp, layout.num_virtual_stages, layout.schedule)
    return "even" if counts == even else counts_text(counts)


def steps_text(steps: tuple[int, ...]) -> str:
    """``1-10``; ``off`` for none."""
    return "-".join(map(str, steps)) or "off"


def show_pattern(pattern: Mapping[str, tuple[Any, ...]]) -> str:
    """``tp 2, precision O1-bf16|O2-bf16``."""
    return ", ".join(f"{name} {'|'.join(str(plain(v)) for v in values)}" for name, values in pattern.items())


# The short notation of candidates, like ``pp2 z2x8 mbs1 full4 O1-bf16``: every sign, what it means, and the knobs it

_VALUE = r"\{([^}]+)\}"
"""A value in the text of a sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One element of the notation; ``{N}`` and the like in its texts stand for values."""

    text: str
    """As it stands in names: ``pp{N}``."""
    meaning: str
    knobs: tuple[str, ...]
    """Names of the knobs that it tells of."""
    is_suffix: bool = False
    """Whether it follows another sign without a blank."""

    @property
    def general(self) -> str:
        """The sign with letters for its values: ``ppN``; a suffix after three dots."""
        text = _with_letters(self.text)
        return f"…{text}" if self.is_suffix else text

    @property
    def general_meaning(self) -> str:
        """The meaning with letters for its values; a value at its end, which says no more than the sign, left out."""
        return _with_letters(re.sub(rf": {_VALUE}$", "", self.meaning))


def _with_letters(text: str) -> str:
    return text.replace("{", "").replace("}", "")


def _sign(text: str, meaning: str, *knobs: str, is_suffix: bool = False) -> Sign:
    return Sign(text=text, meaning=meaning, knobs=knobs, is_suffix=is_suffix)


PP = _sign("pp{N}", "pipeline of {N} stages", "pp")
SCHEDULES: Mapping[str, Sign] = {
    "gpipe": _sign("gpipe", "schedule: all forward, then all backward", "schedule"),
    "1f1b": _sign("1f1b", "schedule: forward and backward in turn", "schedule"),
    "interleaved": _sign("interleaved", "schedule: chunks of layers in turn", "schedule"),
    "zbv": _sign("zbv", "schedule: zero bubble, V-shaped", "schedule"),
}
CHUNKS = _sign("v{N}", "chunks of layers per stage: {N}", "num_virtual_stages", is_suffix=True)
STAGE_LAYERS = _sign("L{A,B}", "layers per stage: {A,B}", "stage_layers")
REPLICAS = _sign("dp{N}", "data-parallel replicas: {N}", "dp_replicate")
WITH_FSDP2 = _sign("f", "replicated by FSDP2 instead of DDP", "replicate_with", is_suffix=True)
SHARDS = _sign("z{S}x{N}", "ZeRO stage {S} over {N} devices", "zero_stage", "dp_shard")
WHOLE_GRADIENTS = _sign("g", "gradients reduced after the last micro-batch only", "gradient_reduction", is_suffix=True)
EMBEDDING = _sign("emb", "embedding and head sharded over all data-parallel devices", "shard_embedding")
CONTEXT = _sign("cp{N}", "every sequence over {N} devices", "cp")
CP_METHODS: Mapping[str, Sign] = {
    "ulysses": _sign("u", "by exchanging heads (Ulysses)", "cp_method", is_suffix=True),
    "ring": _sign("r", "by passing keys and values around (ring)", "cp_method", is_suffix=True),
}
TENSOR = _sign("tp{N}", "every layer over {N} devices", "tp")
SEQUENCE = _sign("sp", "with sequence parallelism", "sequence_parallel", is_suffix=True)
LOCAL = _sign("l", "by the local engine instead of DTensor", "tp_engine", is_suffix=True)
COPIES = _sign("c{N}", "micro-batches run as {N} overlapping copies", "num_copies", is_suffix=True)
MICRO_BATCH = _sign("mbs{N}", "micro-batch size {N}", "micro_batch_size")
FULL = _sign("full{N}", "layers recomputed in full: {N}", "recompute")
SELECTIVE = _sign("~{PATTERN}:{N}", "layers that recompute {PATTERN}: {N}", "recompute")
COMMUNICATION = _sign("comm:{N}", "layers that communicate again in the backward pass: {N}", "recompute")
PRECISIONS: Mapping[str, Sign] = {
    "O0": _sign("O0", "fp32", "precision"),
    "O1": _sign("O1-{TYPE}", "autocast to {TYPE}", "precision"),
    "O1-fp8": _sign("O1-fp8", "autocast to bf16, the layers' matmuls in 8-bit floats", "precision"),
    "O2": _sign("O2-{TYPE}", "parameters in {TYPE}, fp32 masters", "precision"),
}
LISTS = _sign("{+A-B}", "operators forced to 16 bits (+) or to fp32 (-): {+A-B}", "precision", is_suffix=True)
LOSS_SCALE = _sign("~{ID}", "a loss scale of its own, known as {ID}", "precision", is_suffix=True)
OFFLOADED = _sign("off-{WHAT}", "in host memory: {WHAT}", "offload_activations", "offload_optimizer")
WORKERS = _sign("w{N}", "loading processes per device: {N}", "num_workers")
PREFETCH = _sign("p{N}", "batches ahead of each: {N}", "prefetch_factor", is_suffix=True)
TUNED = _sign("w-{HOW}", "loading processes found before training: {HOW}", "dataloader")
PINNED = _sign("pin", "pinned host memory", "pin_memory")
KEPT = _sign("keep", "loading processes kept from epoch to epoch", "persistent_workers")
FULL_BATCH = _sign("fullbatch", "every device reads the whole batch", "full_batch")
COMPILED: Mapping[str, Sign] = {
    "block": _sign("compile", "every layer compiled", "compile"),
    "model": _sign("compile-model", "the whole model compiled", "compile"),
}
COMPILE_MODE = _sign("-{MODE}", "mode of torch.compile: {MODE}", "compile_mode", is_suffix=True)
BACKEND = _sign("-{NAME}", "backend of torch.compile: {NAME}", "compile", is_suffix=True)
KERNELS: Mapping[Sign, Callable[[Kernels], str | None]] = {
    _sign("attn-{NAME}", "attention kernel {NAME}", "attention"): (
        lambda kernels: kernels.attention if kernels.attention != "auto" else None
    ),
    _sign("matmul-{NAME}", "precision of fp32 matrix products: {NAME}", "matmul_precision"): (
        lambda kernels: kernels.matmul_precision if kernels.matmul_precision != "highest" else None
    ),
    _sign("cudnn{A-B}", "cuDNN measures its algorithms in steps {A-B}", "cudnn_benchmark"): (
        lambda kernels: steps_text(kernels.cudnn_tuning_range) if kernels.cudnn_tuning_range else None
    ),
    _sign("nhwc", "channels last in memory", "memory_format"): (
        lambda kernels: "" if kernels.memory_format == "nhwc" else None
    ),
    _sign("loss{N}", "head and loss in {N} parts", "loss_chunks"): (
        lambda kernels: str(kernels.loss_chunks) if kernels.loss_chunks > 1 else None
    ),
    _sign("format-auto", "memory format by number format", "memory_format"): (
        lambda kernels: "" if kernels.memory_format == "auto" else None
    ),
}
"""Sign to its value in a candidate's kernels; None where the name does not hold it."""
OWN = _sign("{KNOB}={VALUE}", "your own knob {KNOB}: {VALUE}", "own")
MAX_OWN_CHARS = 24
"""Characters of a value of an own knob in a name; of longer ones the first and a tag."""

NOTATION: tuple[Sign, ...] = (
    PP, *SCHEDULES.values(), CHUNKS, STAGE_LAYERS, REPLICAS, WITH_FSDP2, SHARDS, WHOLE_GRADIENTS, EMBEDDING, CONTEXT,
    *CP_METHODS.values(), TENSOR, SEQUENCE, LOCAL, COPIES, MICRO_BATCH, FULL, SELECTIVE, COMMUNICATION,
    *PRECISIONS.values(), LISTS, LOSS_SCALE, OFFLOADED, WORKERS, PREFETCH, TUNED, PINNED, KEPT, FULL_BATCH,
    *COMPILED.values(), COMPILE_MODE, BACKEND, *KERNELS, OWN,
)  # fmt: skip
"""All signs, in the order in which names hold them."""


@dataclass(frozen=True, slots=True)
class NamePart:
    """A sign with its values."""

    sign: Sign
    values: Mapping[str, object]

    @property
    def text(self) -> str:
        """As it stands in the name: ``pp2``."""
        return _filled(self.sign.text, self.values)

    @property
    def meaning(self) -> str:
        """What it says: ``pipeline of 2 stages``."""
        return _filled(self.sign.meaning, self.values)


def _filled(text: str, values: Mapping[str, object]) -> str:
    return re.sub(_VALUE, lambda found: str(values[found[1]]), text)


Word = tuple[NamePart, ...]
"""A word of a name: ``tp2sp`` is ``tp2`` and ``sp``."""


def word_text(word: Word) -> str:
    """The word as it stands in the name; parts of recompute are joined by a plus sign."""
    return "".join(f"+{part.text}" if i and not part.sign.is_suffix else part.text for i, part in enumerate(word))


def words_of(candidate: Candidate) -> Iterator[Word]:
    """The words of a candidate's name, in order."""
    yield from _layout_words(candidate.layout)
    yield (NamePart(MICRO_BATCH, {"N": candidate.micro_batch_size}),)
    if candidate.recompute != Recompute():
        yield tuple(_recompute_parts(candidate))
    yield tuple(_precision_parts(candidate.precision))
    yield from _offload_words(candidate.offload)
    yield from _loader_words(candidate.loader)
    yield from _kernel_words(candidate.kernels)
    yield from _own_words(candidate.own)


def spelled(candidate: Candidate) -> list[tuple[str, str]]:
    """Every sign of the candidate's name with what it says."""
    return [(part.text, part.meaning) for word in words_of(candidate) for part in word]


def legend(candidates: Iterable[Candidate]) -> list[tuple[str, str]]:
    """The signs that occur in the candidates' names, in general: ``ppN``, ``pipeline of N stages``."""
    found = {part.sign for candidate in candidates for word in words_of(candidate) for part in word}
    return [(sign.general, sign.general_meaning) for sign in NOTATION if sign in found]


def notation_table() -> str:
    """All signs as a Markdown table, for ``docs/notation.md``."""
    lines = ["| sign | meaning | knob |", "|---|---|---|"]
    for sign in NOTATION:
        knobs = ", ".join(f"[{knob}](knobs.md#{knob})" for knob in sign.knobs)
        lines.append(f"| `{sign.general}` | {sign.general_meaning} | {knobs} |")
    return "\n".join(lines) + "\n"


def _layout_words(layout: Layout) -> Iterator[Word]:
    if layout.pp > 1:
        yield (NamePart(PP, {"N": layout.pp}),)
        has_chunks = layout.num_virtual_stages > 1 and layout.schedule != "zbv"
        chunks = (NamePart(CHUNKS, {"N": layout.num_virtual_stages}),) if has_chunks else ()
        yield (NamePart(SCHEDULES[layout.schedule], {}), *chunks)
        if (split := stage_layers_text(layout)) != "even":
            yield (NamePart(STAGE_LAYERS, {"A,B": split}),)
    if layout.dp_replicate > 1 or layout.world_size == 1 or layout.replicate_with == "fsdp2":
        engine = (NamePart(WITH_FSDP2, {}),) if layout.replicate_with == "fsdp2" else ()
        yield (NamePart(REPLICAS, {"N": layout.dp_replicate}), *engine)
    if layout.dp_shard > 1:
        whole = (NamePart(WHOLE_GRADIENTS, {}),) if layout.gradient_reduction == "last" else ()
        yield (NamePart(SHARDS, {"S": layout.zero_stage, "N": layout.dp_shard}), *whole)
    if layout.shard_embedding:
        yield (NamePart(EMBEDDING, {}),)
    if layout.cp > 1:
        method = CP_METHODS.get(layout.cp_method)
        yield (NamePart(CONTEXT, {"N": layout.cp}), *((NamePart(method, {}),) if method else ()))
    if layout.tp > 1:
        flags = {SEQUENCE: layout.sequence_parallel, LOCAL: layout.tp_engine == "local", COPIES: layout.num_copies > 1}
        suffixes = (NamePart(sign, {"N": layout.num_copies}) for sign, is_on in flags.items() if is_on)
        yield (NamePart(TENSOR, {"N": layout.tp}), *suffixes)


def _recompute_parts(candidate: Candidate) -> Iterator[NamePart]:
    for named in recompute_text(candidate.recompute, candidate.layout).split(" "):
        what, _, number = named.rpartition(":")
        if what in ("full", "comm"):
            yield NamePart(FULL if what == "full" else COMMUNICATION, {"N": number})
        else:
            yield NamePart(SELECTIVE, {"PATTERN": what.removeprefix("~"), "N": number})


def _precision_parts(precision: Precision) -> Iterator[NamePart]:
    lists, scale = lists_text(precision), loss_scale_text(precision)
    yield NamePart(PRECISIONS[precision.level], {"TYPE": DTYPE_SHORT[precision.dtype]})
    if precision.level != "O0" and lists:
        yield NamePart(LISTS, {"+A-B": lists})
    if precision.level != "O0" and scale:
        yield NamePart(LOSS_SCALE, {"ID": scale.removeprefix("~")})


def _offload_words(offload: Offload) -> Iterator[Word]:
    parts = {"act": offload.activations, "opt": offload.optimizer}
    if what := "+".join(part for part, is_on in parts.items() if is_on):
        yield (NamePart(OFFLOADED, {"WHAT": what}),)


def _loader_words(loader: Loader) -> Iterator[Word]:
    if loader.num_workers:
        ahead = (NamePart(PREFETCH, {"N": loader.prefetch_factor}),) if loader.prefetch_factor != 2 else ()
        yield (NamePart(WORKERS, {"N": loader.num_workers}), *ahead)
    if loader.tuning is not None:
        yield (NamePart(TUNED, {"HOW": plain(loader.tuning)}),)
    flags = {PINNED: loader.pin_memory, KEPT: loader.persistent_workers, FULL_BATCH: loader.full_batch}
    yield from ((NamePart(sign, {}),) for sign, is_on in flags.items() if is_on)


def _kernel_words(kernels: Kernels) -> Iterator[Word]:
    default = Kernels()
    if kernels.compile != "off":
        mode = (NamePart(COMPILE_MODE, {"MODE": kernels.compile_mode}),)
        backend = (NamePart(BACKEND, {"NAME": kernels.backend}),)
        yield (
            NamePart(COMPILED[kernels.compile], {}),
            *(mode if kernels.compile_mode != default.compile_mode else ()),
            *(backend if kernels.backend != default.backend else ()),
        )
    for sign, value_of in KERNELS.items():
        if (value := value_of(kernels)) is not None:
            yield (NamePart(sign, dict.fromkeys(re.findall(_VALUE, sign.text), value)),)


def _own_words(own: tuple[OwnChoice, ...]) -> Iterator[Word]:
    shorts = [_short_own(choice.name) for choice in own]
    for choice, short in zip(own, shorts, strict=True):
        name = short if shorts.count(short) == 1 else choice.name
        text = re.sub(r"\s+", "_", own_text(choice.value))
        if len(text) > MAX_OWN_CHARS:
            text = f"{text[: MAX_OWN_CHARS - 7]}~{digest(choice.value)[:6]}"
        yield (NamePart(OWN, {"KNOB": name, "VALUE": text}),)


def _short_own(name: str) -> str:
    """The name without dashes, dollar, file and the keys above: ``zero_optimization.overlap_comm`` -> overlap_comm."""
    return name.lstrip("-$").rpartition(":")[2].rpartition(".")[2] or name


# Names of candidates, short and in full, and how two of them differ

Scalar = str | int | float | bool
Features = Callable[[Candidate], Mapping[str, Scalar]]
"""Flat description of a candidate: knob values by name, like :func:`flat_params`."""

FeatureColumns = Mapping[str, tuple[list[Scalar], Codes]]
"""By feature, its distinct values and every candidate's place among them."""

_READS = {knob.name: ("layout", knob.part) if knob.name == "recompute" else (knob.part,) for knob in KNOBS}
"""Fields of a candidate that each knob's value, as :func:`flat_params` writes it, depends on."""


def feature_columns(table: CandidateTable, features: Features) -> FeatureColumns:
    """The features of all candidates, asked for once per combination of what they depend on.

    One that a candidate does not have is :data:`INHERITED` there.
    """
    reads = {"world_size": ("layout",), "selective": ("recompute",), **_READS}
    reads |= {choice.name: ("own",) for own in table.values["own"] for choice in own}
    columns: dict[str, tuple[list[Scalar], Codes]] = {}
    first = features(table[0]) if len(table) else {}
    names = dict.fromkeys((*first, *(choice.name for own in table.values["own"] for choice in own)))
    for read in dict.fromkeys(reads.get(name, FIELDS) for name in names):
        rows, places = table.each(read, features)
        for name in (name for name in names if reads.get(name, FIELDS) == read):
            known: dict[Scalar, int] = {}
            code = [known.setdefault(row.get(name, INHERITED), len(known)) for row in rows]
            columns[name] = list(known), np.array(code, dtype=np.int32)[places]
    return columns


def describe(candidate: Candidate) -> dict[str, Any]:
    """Key, short name and knobs of a candidate: its part of every JSON document."""
    return {
        "config_key": candidate.config_key,
        "short_name": short_name(candidate),
        "params": flat_params(candidate),
    }


def diff(candidate: Candidate, baseline: Candidate) -> dict[str, tuple[Any, Any]]:
    """Knobs in which the two differ: name to (value in the baseline, value in the candidate), as scalars.

    An own knob that only one of them sets is :data:`INHERITED` in the other.
    """
    before, after = flat_params(baseline), flat_params(candidate)
    pairs = {name: (before.get(name, INHERITED), after.get(name, INHERITED)) for name in {**before, **after}}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def change(candidate: Candidate, baseline: Candidate) -> dict[str, Scalar]:
    """Knobs in which a candidate differs from the baseline, with its values; without the number of devices."""
    return {name: new for name, (_, new) in diff(candidate, baseline).items() if name != "world_size"}


def shared_change(candidates: Iterable[Candidate], baseline: Candidate) -> dict[str, Scalar]:
    """Knobs with a value that all candidates have and the baseline does not; empty without candidates."""
    changes = [change(candidate, baseline).items() for candidate in candidates]
    return dict(one for one in changes[0] if all(one in other for other in changes)) if changes else {}


def flat_params(candidate: Candidate) -> dict[str, Scalar]:
    """Knob values as scalars, plus ``world_size``: parameters of a record, features of a search.

    The user's own knobs follow by their names, those only that the candidate sets.
    """
    params = {knob.name: plain_knob(knob.name, knob.read(candidate), candidate) for knob in KNOBS}
    own = {choice.name: choice.value for choice in candidate.own}
    return {"world_size": candidate.layout.world_size, **params, **own}


def aligned_params(candidates: Iterable[Candidate]) -> list[dict[str, Scalar]]:
    """Knob values of each, all with the same names: own knobs that one of them leaves out are :data:`INHERITED`."""
    params = [flat_params(candidate) for candidate in candidates]
    names = list(dict.fromkeys(name for one in params for name in one))
    return [{name: one.get(name, INHERITED) for name in names} for one in params]


def short_name(candidate: Candidate) -> str:
    """Compact and different for different candidates, like ``dp2 z3x2 tp2sp mbs4 full4 O1-bf16 w2``.

    ``pp2 interleavedv2 L5,4/4,3`` is a pipeline with two chunks per rank and uneven layers; ``dp2f`` replicates with
    FSDP2, ``emb`` shards the embedding, ``cp2u`` is Ulysses, ``tp2splc2`` has sequence parallelism, the local engine
    and two copies. ``w2p4`` has a prefetch factor of 4.
    """
    return " ".join(map(word_text, words_of(candidate)))


def names_apart(candidates: Iterable[Candidate]) -> tuple[list[str], str]:
    """Short names without the words that all of them share, and those words; ``as above`` where nothing is left."""
    names = [list(map(word_text, words_of(candidate))) for candidate in candidates]
    if len(names) < 2:
        return [" ".join(words) for words in names], ""
    shared = set(names[0]).intersection(*names[1:])
    own = [" ".join(word for word in words if word not in shared) or "as above" for words in names]
    return own, " ".join(word for word in names[0] if word in shared)
