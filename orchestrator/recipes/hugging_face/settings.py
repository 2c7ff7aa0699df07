"""Arguments of a program on the Trainer of transformers, from words, from a YAML or JSON file, or from both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

from orchestrator.recipes import documents
from orchestrator.recipes.arguments import Argument, Words, as_truth, either_dash, read, remove, write
from orchestrator.recipes.documents import ABSENT
from orchestrator.recipes.launchers import program_of
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.overlays.findings import Findings

ARGS, DEEPSPEED, FSDP = "args", "deepspeed", "fsdp_config"
"""Placeholders of the file of arguments, and of the configuration files that arguments point to."""
SWITCHES = frozenset(
    ["activation_checkpointing", "auto_find_batch_size", "bf16", "bf16_full_eval", "dataloader_persistent_workers", "dataloader_pin_memory", "disable_gradient_checkpointing", "disable_tqdm", "do_eval", "do_predict", "eval_on_start", "fp16", "fp16_full_eval", "gradient_checkpointing", "load_best_model_at_end", "logging_first_step", "logging_nan_inf_filter", "plot_loss", "push_to_hub", "tf32", "torch_compile", "use_cpu", "no_cuda", "use_reentrant_gc", "add_version", "pure_bf16"]
)
"""Arguments that are true or false."""
COUNTS = frozenset(
    ["per_device_train_batch_size", "gradient_accumulation_steps", "dataloader_num_workers", "dataloader_prefetch_factor", "max_steps", "seed", "block_size", "max_seq_length", "model_max_length", "cutoff_len", "max_length", "deepspeed_autotp_size"]
)
"""Arguments that are whole numbers."""
_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How the arguments of a framework on the Trainer differ from the Trainer's own."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of arguments that are not given, where they are not the Trainer's."""
    overrides: Literal["argument", "assignment"] = "argument"
    """How words beside a file of arguments are spelled: ``--lr 1``, or ``lr=1`` as in OmegaConf."""
    attention: tuple[str, Mapping[str, str]] | None = None
    """Name of the argument that chooses the attention, and our names of its values; the first that we know is written.
    None where programs have such an argument or not, as transformers' examples."""
    recompute: str = "gradient_checkpointing"
    """Name of the argument for recomputing activations."""
    presets: bool = False
    """Whether ``deepspeed`` may name a stage: ``zero2``."""


TRAINER_DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "bf16": False,
    "fp16": False,
    "torch_compile": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_persistent_workers": False,
    "gradient_checkpointing": False,
    "max_steps": -1,
    "seed": 42,
}
"""What ``TrainingArguments`` is where nothing is said, of transformers 4.40 to 5.23."""


class TrainerArguments:
    """Arguments of a command in the making, by name."""

    def __init__(self, edit: Edit, dialect: Dialect) -> None:
        self.edit = edit
        self.dialect = dialect

    # ---- where they stand ----

    @property
    def words(self) -> Words:
        return program_of(self.edit.argv).arguments

    @words.setter
    def words(self, words: Words) -> None:
        self.edit.argv = (*program_of(self.edit.argv).head, *words)

    @property
    def file(self) -> str | None:
        """Placeholder of the file of arguments, if the command has one."""
        return next((name for name in map(_placeholder, file_words(self.words)) if name in self.edit.files), None)

    @property
    def content(self) -> Mapping[str, Any]:
        name = self.file
        found = {} if name is None else documents.load(self.edit.files[name], self.edit.names.get(name, name))
        return found if isinstance(found, Mapping) else {}

    @property
    def is_file_alone(self) -> bool:
        """Whether the program takes its arguments from the file only: no word may stand beside it."""
        return self.file is not None and len(self.words) == 1 and self.dialect.overrides == "argument"

    # ---- reading ----

    def given(self, name: str) -> Any:
        """An argument as it is given, or :data:`ABSENT`."""
        said = read(self.words, self._argument(name))
        return documents.value_at(self.content, name) if said is None else said

    def get(self, name: str, found: Findings | None = None, knob: str = "") -> Any:
        """An argument's value, its default where it is not given; None where it is neither, or not understood."""
        given = self.given(name)
        if given is ABSENT or given is None or given in ("None", "null", ""):
            return self.dialect.defaults.get(name, TRAINER_DEFAULTS.get(name))
        value = _typed(name, given)
        if value is None and found is not None and "{" not in str(given):
            found.unread(knob, f"{name} {given}")
        return value

    def is_on(self, name: str) -> bool:
        return self.get(name) is True

    def mapping(self, name: str) -> tuple[Mapping[str, Any] | None, str | None]:
        """What an argument says that is a mapping, or the path of a file with one; and that file's placeholder."""
        given = self.given(name)
        if isinstance(given, Mapping):
            return given, None
        if not isinstance(given, str):
            return None, None
        placed = _placeholder(given)
        if placed not in self.edit.files and PurePath(given).name == self.edit.names.get(name):
            placed = name
        if placed in self.edit.files:
            content = documents.load(self.edit.files[placed], self.edit.names.get(placed, placed))
            return content if isinstance(content, Mapping) else None, placed
        if given.lstrip().startswith("{"):
            content = documents.load(given, f"{name}.json")
            return content if isinstance(content, Mapping) else None, None
        return None, None

    # ---- writing ----

    def put(self, name: str, value: Any) -> None:
        """Give an argument a value where it is given now; a new one goes into the file, or behind the words."""
        argument, words = self._argument(name), self.words
        if self._is_in_file(name):
            self._put_key(name, value)
        elif isinstance(value, bool) and argument.takes == "switch":
            self.words = write(words, argument, value)
        else:
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
            self.words = write(words, argument, text.lower() if isinstance(value, bool) else text)

    def put_mapping(self, name: str, changes: Mapping[str, Any], placeholder: str) -> None:
        """Change keys of a mapping that an argument gives; where it gives none, make one.

        In a file of its own it is changed there, in a copy; in a file of arguments it is written out in its place.
        """
        content, placed = self.mapping(name)
        if placed is not None and not self._is_in_file(name):
            file = self.edit.names.get(placed, placed)
            self.edit.files[placed] = documents.edited(self.edit.files[placed], file, changes)
            return
        text = documents.edited(json.dumps(dict(content or {})), f"{name}.json", changes)
        if self.file is not None and self._is_in_file(name):
            self._put_key(name, json.loads(text))
        else:
            self.edit.files[placeholder] = text
            self.put(name, f"{{{placeholder}}}")

    def write_out(self, *names: str) -> None:
        """Put what a file of arguments only points to into its copy: no copy of another file can be named there."""
        for name in names:
            content, placed = self.mapping(name)
            if content is not None and placed is not None and self._is_in_file(name):
                self._put_key(name, dict(content))

    def _is_in_file(self, name: str) -> bool:
        """Whether the file of arguments says an argument, or is to say it."""
        in_words = read(self.words, self._argument(name)) is not None
        return self.file is not None and not in_words and self._goes_into_file(name)

    def drop(self, *names: str) -> None:
        """Take arguments away."""
        self.words = remove(self.words, *(self._argument(name) for name in names))
        gone = {name: ABSENT for name in names if documents.value_at(self.content, name) is not ABSENT}
        if gone and self.file is not None:
            self._edit_file(gone)

    def _goes_into_file(self, name: str) -> bool:
        return (
            self.is_file_alone
            or self.dialect.overrides == "assignment"
            or documents.value_at(self.content, name) is not ABSENT
        )

    def _put_key(self, name: str, value: Any) -> None:
        self._edit_file({name: value})

    def _edit_file(self, changes: Mapping[str, Any]) -> None:
        file = self.file
        assert file is not None
        self.edit.files[file] = documents.edited(self.edit.files[file], self.edit.names.get(file, file), changes)

    def _argument(self, name: str) -> Argument:
        if self.dialect.overrides == "assignment" and self.file is not None:
            return Argument(name=name, takes="assignment")
        if name in SWITCHES:
            return either_dash(f"--{name}", "switch", negative=(f"--no_{name}",))
        return either_dash(f"--{name}")


def file_words(words: Words) -> Words:
    """Words that name a file of arguments: one alone, the first before assignments, that of ``--config``."""
    config = read(words, Argument(name="--config"))
    if isinstance(config, str) and config:
        return (config,)
    firsts = words[1:2] if words[:1] == ("train",) else words[:1]
    rest = words[words.index(firsts[0]) + 1 :] if firsts else ()
    is_alone = all("=" in word and not word.startswith("-") for word in rest)
    return firsts if is_alone and firsts and not firsts[0].startswith("-") else ()


def find_files(argv: Words, cwd: str, *, names: Iterable[str] = (DEEPSPEED, FSDP)) -> dict[str, str]:
    """Path by placeholder of the file of arguments, and of the files that arguments in it or beside it point to."""
    words, found = program_of(argv).arguments, {}
    content: Any = {}
    for word in file_words(words):
        path = Path(cwd, word)
        if word.endswith(_SUFFIXES) and path.is_file():
            found[ARGS] = str(path)
            content = documents.load(path.read_text(encoding="utf-8"), word)
    for name in names:
        given = read(words, either_dash(f"--{name}")) or read(words, Argument(name=name, takes="assignment"))
        given = given or (content.get(name) if isinstance(content, Mapping) else None)
        if isinstance(given, str) and given.endswith(_SUFFIXES) and Path(cwd, given).is_file():
            found[name] = str(Path(cwd, given))
    return found


def _placeholder(word: str) -> str:
    """The name in ``{name}``; the word itself otherwise."""
    return word[1:-1] if word.startswith("{") and word.endswith("}") and word[1:-1].isidentifier() else word


def _typed(name: str, given: Any) -> Any:
    """A value as the argument's type; None where it is of another."""
    if name in SWITCHES:
        return as_truth(given if isinstance(given, bool | str) else str(given))
    if name in COUNTS:
        try:
            return int(given)
        except (TypeError, ValueError):
            return None
    return given
