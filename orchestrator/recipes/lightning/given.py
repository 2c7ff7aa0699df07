"""Settings of a LightningCLI command of the user's own: arguments like ``--trainer.precision``, which count more than
the files behind ``--config``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.recipes import arguments, documents
from orchestrator.recipes.arguments import Argument, Words
from orchestrator.recipes.launchers import imports, script_text
from orchestrator.recipes.overlays.edit import Edit, EditedFile
from orchestrator.recipes.training import Run

CONFIG = Argument(name="--config", aliases=("-c",))
_SECTIONS = ("--trainer.", "--trainer=", "--data.", "--data=", "--model.", "--model=")
_PACKAGES = {"lightning", "pytorch_lightning", "lightning_fabric"}
NOTHING = documents.ABSENT


def recognises(run: Run) -> bool:
    text = script_text(run.argv, run.cwd)
    return bool(_PACKAGES & imports(text)) if text else is_cli(run.argv)


def is_cli(argv: Words) -> bool:
    """Whether the program takes LightningCLI's arguments, as far as the command tells."""
    return "fit" in argv or any(word.startswith(_SECTIONS) for word in argv)


def find_files(argv: Words, cwd: str) -> Mapping[str, str]:
    """The files behind ``--config``, in their order."""
    if not is_cli(argv):
        return {}
    words = [word for word in _configs(argv) if "{" not in word and Path(cwd, word).is_file()]
    return {f"config{number or ''}": str(Path(cwd, word)) for number, word in enumerate(words)}


def _configs(argv: Words) -> Iterator[str]:
    for index, word in enumerate(argv):
        if word in CONFIG.spellings and index + 1 < len(argv):
            yield argv[index + 1]
        elif word.startswith("--config="):
            yield word.partition("=")[2]


class LightningArguments:
    """Settings of an edit by dotted name."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        placed = [word.rpartition("=")[2][1:-1] for word in _configs(edit.argv)]
        names = [name for name in placed if name in edit.files]
        for name in names:
            edit.names[name] = f"{name}.yaml"
        self._files = [EditedFile(edit, name) for name in names]

    def get(self, name: str, default: Any = NOTHING) -> Any:
        """The value that counts; ``default`` where the command does not say it."""
        said = arguments.read_text(self._edit.argv, Argument(name=f"--{name}"))
        if said is not None:
            return None if said.lower() in ("null", "none") else said
        for file in reversed(self._files):
            for key in (name, f"fit.{name}"):
                if file.has(key):
                    return file.get(key)
        return default

    def of_data(self, name: str) -> str | None:
        """Full name of a setting of the data module, which may be one of several classes."""
        names = (f"data.{name}", f"data.init_args.{name}")
        return next((full for full in names if self.get(full) is not NOTHING), None)

    def put(self, name: str, value: Any) -> None:
        """Write an argument at the end, behind every ``--config``: the last one counts."""
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        argument = Argument(name=f"--{name}")
        if arguments.read_text(self._edit.argv, argument) != text:
            self._edit.argv = (*arguments.remove(self._edit.argv, argument), f"--{name}={text}")

    def drop(self, name: str) -> None:
        self._edit.argv = arguments.remove(self._edit.argv, Argument(name=f"--{name}"))
