"""What ``accelerate launch`` passes on to a program: its options, and its YAML including the user's default one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.frameworks import documents
from orchestrator.frameworks.arguments import either_dash, read_text
from orchestrator.frameworks.edit import Edit, Run
from orchestrator.frameworks.launchers import Launched, count
from orchestrator.frameworks.trainer_arguments import (
    CONFIG,
    DEEPSPEED_CONFIG,
    environment,
    find_launch_files,
    world_size,
)
from trials.files import read_regular

_UNSET = ("ACCELERATE_MIXED_PRECISION", "no")
"""The variable that changes nothing."""
_MODULE = "accelerate.commands.launch"
_ON_PATH = {"accelerate": 2, "accelerate-launch": 1}
"""Commands of the launcher, and their number of words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateLaunch:
    """An ``accelerate launch`` in front of a program."""

    words: tuple[str, ...]
    """The words in front of the program."""
    num_replaced: int
    """Words that start the program without the launcher, such as ``python``."""
    variables: Mapping[str, str]
    """Variables that it sets for the ranks."""
    world_size: int | None = None
    """Ranks on all nodes; None if not set."""
    num_nodes: int | None = None

    def before(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """The command of one rank with the launcher in front again."""
        return (*self.words, *argv[self.num_replaced :])


def read_launch(argv: tuple[str, ...], found: Launched, program: tuple[str, ...], cwd: Path) -> AccelerateLaunch:
    """What the launcher of ``argv`` sets for ``program``, the command of one rank.

    Raises:
        ConfigError: its YAML cannot be read, or selects something that only it can start.
    """
    edit, config = _opened(argv, found, cwd)
    variables = environment(found.options, edit)
    for note in edit.notes:
        raise ConfigError(
            note.message,
            file=edit.names.get(CONFIG),
            key="distributed_type",
            remedy="Select DeepSpeed, FSDP or none of them, or pass the command of one rank: tune-cluster init -- "
            "python train.py ...",
        )
    path = edit.names.get(DEEPSPEED_CONFIG, "")
    variables = {name: text.replace(f"{{{DEEPSPEED_CONFIG}}}", path) for name, text in variables.items()}
    num_same = _num_same_at_end(argv, program)
    words, replaced = argv[: len(argv) - num_same], program[: len(program) - num_same]
    if words[0] in _ON_PATH and replaced and replaced[0] != "python":  # otherwise the ranks would use PATH's python
        words = (replaced[0], "-m", _MODULE, *words[_ON_PATH[words[0]] :])
    nodes = read_text(found.options, either_dash("--num-machines")) or str(config.get("num_machines"))
    return AccelerateLaunch(
        words=words,
        num_replaced=len(replaced),
        variables={name: text for name, text in variables.items() if (name, text) != _UNSET},
        world_size=world_size(found, edit),
        num_nodes=count(nodes),
    )


def _opened(argv: tuple[str, ...], found: Launched, cwd: Path) -> tuple[Edit, Mapping[str, Any]]:
    """The command with the launcher's files by their paths, and the content of its YAML."""
    given = read_text(found.options, either_dash("--config-file"))
    if given and not (cwd / given).is_file():
        raise ConfigError(f"file {given!r} does not exist", key="--config_file", remedy="Check the path.")
    paths = find_launch_files(argv, str(cwd))
    files = {name: read_regular(Path(path)) for name, path in paths.items()}
    edit = Edit.of_run(Run(argv=argv, cwd=str(cwd), files=files, paths=paths), copies_files=False)
    edit.names = paths
    content = documents.load(files[CONFIG], paths[CONFIG]) if CONFIG in files else {}
    return edit, content if isinstance(content, Mapping) else {}


def _num_same_at_end(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((place for place, (word, same) in enumerate(pairs) if word != same), min(len(one), len(other)))
