"""The script's own arguments for batch size, accumulation, workers, precision, seed: those of common names."""

from __future__ import annotations

import re
from typing import Any, Literal

from orchestrator.recipes.arguments import Argument, Words, either_dash, is_given, read_text, remove, write
from orchestrator.recipes.hugging_face.declared import ACCUMULATION, MICRO_BATCH, SEED, WORKERS, named
from orchestrator.recipes.hugging_face.overlay import TrainerLaying
from orchestrator.recipes.launchers import program_of
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.overlays.findings import ReadingDraft
from trials.script.command import OUT

Role = Literal["batch", "accumulation", "workers", "precision", "seed"]
_NAMES: dict[Role, Words] = {
    "batch": MICRO_BATCH,
    "accumulation": ACCUMULATION,
    "workers": WORKERS,
    "precision": ("mixed_precision",),
    "seed": SEED,
}
_QUIET = {"output_dir": OUT, "project_dir": OUT, "logging_dir": OUT}
"""Arguments of the examples of Accelerate and transformers that name a folder."""
_OFF = ("with_tracking", "push_to_hub", "report_to", "checkpointing_steps", "resume_from_checkpoint")
"""Arguments of these examples that trials go without."""


class ScriptWords:
    """Arguments of a command in the making by what they are for."""

    def __init__(self, edit: Edit, text: str) -> None:
        self._edit = edit
        self._head = program_of(edit.argv).head
        self._text = text
        words = self.words
        self._found = {role: found for role, names in _NAMES.items() if (found := named(words, text, names))}

    @property
    def words(self) -> Words:
        return self._edit.argv[len(self._head) :]

    @property
    def accumulates(self) -> bool:
        """Whether the script has Accelerate accumulate gradients."""
        return ".accumulate(" in self._text

    @property
    def decides_precision(self) -> bool:
        """Whether the script names a precision itself, which wins over the variable."""
        return re.search(r"Accelerator\([^)]*mixed_precision\s*=", self._text) is not None

    def has(self, role: Role) -> bool:
        return role in self._found

    def text(self, role: Role) -> str | None:
        """What an argument says, or its default as text; None where there is no such argument."""
        if role not in self._found:
            return None
        argument, default = self._found[role]
        given = read_text(self.words, argument)
        return given if given is not None else None if default is None else str(default)

    def whole(self, role: Role, found: ReadingDraft) -> int | None:
        """What an argument says as a whole number; None where there is no such argument, or it is none."""
        text = self.text(role)
        return None if text is None else found.whole(_KNOBS[role], self._found[role][0].name, text)

    def put(self, role: Role, value: Any) -> None:
        self._put(self._found[role][0], str(value))

    def write(self, laying: TrainerLaying) -> None:
        """Batch size, workers and seed of a candidate; an error for those that the script has no argument for."""
        candidate, request = laying.candidate, laying.request
        if laying.changes("micro_batch_size") and self.has("batch"):
            self.put("batch", candidate.micro_batch_size)
        elif laying.changes("micro_batch_size"):
            advice = "put {micro_batch_size} where your command says the batch size"
            self._edit.refuse("micro_batch_size", f"no argument of the script is known to mean it: {advice}")
        if laying.changes("loader.num_workers") and self.has("workers"):
            self.put("workers", candidate.loader.num_workers)
        if request.seed is not None and request.seed != request.reading.seed and self.has("seed"):
            self.put("seed", request.seed)
        for choice in candidate.own:
            self._put(either_dash(f"--{choice.name}"), str(choice.value))

    def quiet(self) -> None:
        """Folders into the trial's own; trackers, checkpoints and the hub left out."""
        for name, value in _QUIET.items():
            if is_given(self.words, either_dash(f"--{name}")):
                self._put(either_dash(f"--{name}"), value)
        for name in _OFF:
            kind: Literal["flag", "value"] = "flag" if name in ("with_tracking", "push_to_hub") else "value"
            self._drop(either_dash(f"--{name}", kind))

    def _put(self, argument: Argument, text: str) -> None:
        self._edit.argv = (*self._head, *write(self.words, argument, text))

    def _drop(self, argument: Argument) -> None:
        self._edit.argv = (*self._head, *remove(self.words, argument))


_KNOBS: dict[Role, str] = {
    "batch": "micro_batch_size",
    "accumulation": "micro_batch_size",
    "workers": "loader.num_workers",
    "precision": "precision.dtype",
    "seed": "workload.seed",
}
