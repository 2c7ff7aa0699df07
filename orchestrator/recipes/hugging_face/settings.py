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
from orchestrator.recipes.overlays.edit import Edit, EditedFile
from orchestrator.recipes.overlays.findings import ReadingDraft

ARGS, DEEPSPEED, FSDP = "args", "deepspeed", "fsdp_config"
"""Placeholders of the file of arguments, and of the configuration files that arguments point to."""
SWITCHES = frozenset(
    [
        "activation_checkpointing",
        "auto_find_batch_size",
        "bf16",
        "bf16_full_eval",
        "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "disable_gradient_checkpointing",
        "disable_tqdm",
        "do_eval",
        "do_predict",
        "eval_on_start",
        "fp16",
        "fp16_full_eval",
        "gradient_checkpointing",
        "load_best_model_at_end",
        "logging_first_step",
        "logging_nan_inf_filter",
        "plot_loss",
        "push_to_hub",
        "tf32",
        "torch_compile",
        "use_cpu",
        "no_cuda",
        "use_reentrant_gc",
        "add_version",
        "pure_bf16",
    ]
)
"""Arguments that are true or false."""
COUNTS = frozenset(
    [
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "dataloader_num_workers",
        "dataloader_prefetch_factor",
        "max_steps",
        "seed",
        "block_size",
        "max_seq_length",
        "model_max_length",
        "cutoff_len",
        "max_length",
        "deepspeed_autotp_size",
    ]
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


class FileSection:
    """The part below a key of a configuration file; the whole of it below no key."""

    def __init__(self, document: EditedFile, key: str = "") -> None:
        self._document = document
        self._head = f"{key}." if key else ""

    def get(self, key: str, default: Any = None) -> Any:
        return self._document.get(self._head + key, default)

    def has(self, key: str) -> bool:
        return self._document.has(self._head + key)

    def put(self, changes: Mapping[str, Any]) -> None:
        self._document.put({self._head + key: value for key, value in changes.items()})


class TrainerArguments:
    """Arguments of a command in the making, by name."""

    def __init__(self, edit: Edit, dialect: Dialect) -> None:
        self.edit = edit
        self.dialect = dialect
        self._program = program_of(edit.argv)
        placed = [_placeholder(word) for word in file_words(self._program.arguments)]
        self.file = next((name for name in placed if name in edit.files), None)
        """Placeholder of the file of arguments, if the command has one."""
        self._document = EditedFile(edit, self.file or "")
        for name in (DEEPSPEED, FSDP):
            self._place(name)

    def _place(self, name: str) -> None:
        """Give a configuration written in place of a path a file of its own; one that a file of arguments points to
        is put in the path's place, because no copy of another file can be named there."""
        given = self.given(name)
        if not isinstance(given, str):
            return
        in_words = read(self.words, self._argument(name)) is not None
        if in_words and given.lstrip().startswith("{") and _placeholder(given) == given:
            self.edit.files[name], self.edit.names[name] = given, f"{name}.json"
            self.put(name, f"{{{name}}}")
        elif not in_words and name in self.edit.files and PurePath(given).name == self.edit.names.get(name):
            self._document.put({name: documents.load(self.edit.files[name], given)})

    # ---- where they stand ----

    @property
    def words(self) -> Words:
        return self.edit.argv[len(self._program.head) :]

    @words.setter
    def words(self, words: Words) -> None:
        self.edit.argv = (*self._program.head, *words)

    # ---- reading ----

    def given(self, name: str) -> Any:
        """An argument as it is given, or :data:`ABSENT`."""
        said = read(self.words, self._argument(name))
        return self._document.get(name, ABSENT) if said is None else said

    def get(self, name: str, found: ReadingDraft | None = None, knob: str = "") -> Any:
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

    def section(self, name: str) -> FileSection | None:
        """The mapping that an argument gives, in the file of arguments or one of its own; None where there is none."""
        given = self.given(name)
        if isinstance(given, Mapping):
            return FileSection(self._document, name)
        placed = _placeholder(given) if isinstance(given, str) else ""
        return FileSection(EditedFile(self.edit, placed)) if placed in self.edit.files else None

    # ---- writing ----

    def put(self, name: str, value: Any) -> None:
        """Give an argument a value where it is given now; a new one goes into the file, or behind the words."""
        argument = self._argument(name)
        if self._is_in_file(name):
            self._document.put({name: value})
        elif isinstance(value, bool) and argument.takes == "switch":
            self.words = write(self.words, argument, value)
        else:
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
            self.words = write(self.words, argument, text.lower() if isinstance(value, bool) else text)

    def make_section(self, name: str, content: Mapping[str, Any], placeholder: str) -> None:
        """Give an argument a mapping: in the file of arguments, or in a file of its own under ``placeholder``."""
        if self._is_in_file(name):
            self._document.put({name: dict(content)})
            return
        file = f"{placeholder}.json"
        self.edit.files[placeholder], self.edit.names[placeholder] = documents.dumped(dict(content), file), file
        self.put(name, f"{{{placeholder}}}")

    def drop(self, *names: str) -> None:
        """Take arguments away."""
        self.words = remove(self.words, *(self._argument(name) for name in names))
        self._document.drop(*names)

    def _is_in_file(self, name: str) -> bool:
        """Whether the file of arguments says an argument, or is to say it: a program that takes a file alone takes no
        words beside it."""
        if self.file is None or read(self.words, self._argument(name)) is not None:
            return False
        is_alone = len(self.words) == 1 or self.dialect.overrides == "assignment"
        return is_alone or self._document.has(name)

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
