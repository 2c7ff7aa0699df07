"""Arguments of a PaddleNLP command of the user's own: in a JSON file, on the command line, or both, where the latter
counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from orchestrator.recipes import arguments
from orchestrator.recipes.arguments import Words, either_dash
from orchestrator.recipes.overlays.edit import Edit, EditedFile
from orchestrator.recipes.overlays.findings import ReadingDraft

SCRIPTS = ("run_pretrain.py", "run_pretrain_auto.py", "run_finetune.py", "run_sft.py", "finetune_generation.py")
LAUNCH = "paddle.distributed.launch"
MODEL_CONFIG = "model_config"
_SUFFIXES = (".json", ".yaml", ".yml")
_LAUNCHERS = (LAUNCH, "fleetrun")


def script_at(argv: Words) -> int | None:
    """Place of the training script; words before it are the launcher's."""
    return next((index for index, word in enumerate(argv) if word.endswith(".py")), None)


def is_launched(argv: Words) -> bool:
    return any(word in _LAUNCHERS or PurePath(word).name in _LAUNCHERS for word in argv)


def find_files(argv: Words, cwd: str) -> Mapping[str, str]:
    """The file of arguments behind the script, and the model's ``config.json`` where it lies in a folder."""
    at = script_at(argv)
    word = argv[at + 1] if at is not None and at + 1 < len(argv) else ""
    found: dict[str, str] = {}
    if word.endswith(_SUFFIXES) and "{" not in word:
        found["arguments"] = str(Path(cwd, word))
    model = _model_folder(argv, found.get("arguments"))
    config = Path(cwd, model, "config.json") if model else None
    if config is not None and config.is_file():
        found[MODEL_CONFIG] = str(config)
    return found


def _model_folder(argv: Words, file: str | None) -> str | None:
    given = arguments.read_text(argv, either_dash("--model_name_or_path"))
    if given is not None or file is None:
        return given
    try:
        said = json.loads(Path(file).read_text(encoding="utf-8")).get("model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return said if isinstance(said, str) else None


class PaddleArguments:
    """The arguments of an edit by name."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        at = script_at(edit.argv)
        word = edit.argv[at + 1] if at is not None and at + 1 < len(edit.argv) else ""
        self._file = EditedFile(edit, word[1:-1] if word.startswith("{") else "")
        if self._file.exists and word[1:-1] not in edit.names:
            edit.names[word[1:-1]] = f"{word[1:-1]}.json"

    def get(self, name: str, default: Any = None) -> Any:
        text = arguments.read_text(self._edit.argv, either_dash(f"--{name}"))
        return text if text is not None else self._file.get(name, default)

    def whole(self, found: ReadingDraft, knob: str, name: str, default: int | None) -> int | None:
        """A whole number; -1, which asks for the default, is the default."""
        number = found.whole(knob, name, self.get(name), default)
        return default if number == -1 else number

    def is_on(self, name: str, *, default: bool = False) -> bool:
        said = self.get(name, default)
        return said if isinstance(said, bool) else str(said).lower() in ("true", "1", "yes", "y", "t")

    def put(self, values: Mapping[str, Any]) -> None:
        """Write values where the command has them, else in its file, else as arguments."""
        for name, value in values.items():
            argument = either_dash(f"--{name}")
            if self._file.exists and not arguments.is_given(self._edit.argv, argument):
                self._file.put({name: value})
            else:
                text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
                self._edit.argv = arguments.write(self._edit.argv, argument, text)

    def drop(self, *names: str) -> None:
        for name in names:
            self._edit.argv = arguments.remove(self._edit.argv, either_dash(f"--{name}"))
        self._file.drop(*names)
