"""Placeholders of a command: ``{name}`` in its words, its environment and its files, and what stands for them.

``{{name}}`` is the text ``{name}``. ``{out}`` and the names of files are left for the rank to fill in.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from orchestrator.recipes.training import Run
from orchestrator.space.knobs import KNOB_NAMES
from orchestrator.space.knobs.layer_choices import layers_of
from orchestrator.space.knobs.own import argument_text
from orchestrator.space.naming import flat_params
from trials.spec import Candidate, Recompute, Workload

COUNTS = ("accumulation", "total_accumulation", "world_size", "steps", "seed")
"""Placeholders besides knobs: micro-batches of a step on a rank and over all ranks, ranks, last step, seed."""
OUT = "out"
"""The attempt's own folder."""
_BRACED = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")


def names_in(texts: Iterable[str]) -> list[str]:
    """Names of the placeholders, each once, in order."""
    found = (match[2] for text in texts for match in _BRACED.finditer(text))
    return list(dict.fromkeys(name for name in found if name))


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with these placeholders filled in; others stay."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        return values.get(match[2], match[0])

    return _BRACED.sub(value, text)


def filled_run(run: Run, values: Mapping[str, str]) -> Run:
    """The command with placeholders filled in; in files only those of known names, whose braces mean nothing else."""
    return dataclasses.replace(
        run,
        argv=tuple(filled(word, values) for word in run.argv),
        env={name: filled(text, values) for name, text in run.env.items()},
        files={name: _filled_file(text, values) for name, text in run.files.items()},
    )


def _filled_file(text: str, values: Mapping[str, str]) -> str:
    for name in names_in([text]):
        if name in values:
            text = text.replace(f"{{{name}}}", values[name])
    return text


def placeholder_values(candidate: Candidate, workload: Workload, *, last_step: int | None) -> dict[str, str]:
    """What stands for every placeholder but ``{out}`` and the names of files; without a last step ``{steps}`` stays."""
    knobs = flat_params(candidate)
    if candidate.recompute == Recompute(full=layers_of(candidate.layout, workload.num_layers)):
        knobs = {**knobs, "recompute": "full"}  # the word of sweep files, however many layers there are
    counts = {
        "accumulation": max(1, candidate.num_microbatches(workload.global_batch_size)),
        "total_accumulation": max(1, workload.global_batch_size // candidate.micro_batch_size),
        "world_size": candidate.layout.world_size,
        **({} if last_step is None else {"steps": last_step}),
        "seed": workload.seed,
    }
    own = {choice.name: choice.value for choice in candidate.own}
    known = {**{name: knobs[name] for name in KNOB_NAMES}, **own, **counts}
    return {name: argument_text(value) for name, value in known.items()}
