"""Programs on the Trainer of transformers, that of trl included: ``TrainingArguments`` by HfArgumentParser.

Names and defaults are those of transformers 5.23 (``training_args.py``, ``hf_argparser.py``); 4.46 and later have the
same for all that is written here.
"""

from __future__ import annotations

import re
from functools import partial

from orchestrator.frameworks.arguments import Words
from orchestrator.frameworks.edit import Run, Training
from orchestrator.frameworks.launchers import imports, program_of, script_text, without_launcher
from orchestrator.frameworks.trainer import expected_of, overlay_trainer, read_trainer, trial_of_trainer
from orchestrator.frameworks.trainer_arguments import Dialect, find_files, find_launch_files
from trials.script.command import LogFormat

_DIALECT = Dialect()
_PARSERS = ("HfArgumentParser", "TrlParser")
_FIXED_FILE = re.compile(r"parse_json_file\(\s*(?:json_file\s*=\s*)?[\"']")


def _recognises(run: Run) -> bool:
    """Whether the script parses a Trainer's arguments, or is given arguments that only a Trainer has. One that sets
    them in code, or in a file that it names itself, takes none of them."""
    text = script_text(run.argv, run.cwd)
    if imports(text) & {"transformers", "trl"} and any(parser in text for parser in _PARSERS):
        return _FIXED_FILE.search(text) is None
    words = program_of(without_launcher(run.argv).argv).arguments
    return not text and any(word.replace("-", "_").startswith("__per_device_train_batch_size") for word in words)


def _find_files(argv: Words, cwd: str) -> dict[str, str]:
    return {**find_files(without_launcher(argv).argv, cwd), **find_launch_files(argv, cwd)}


TRAINING = Training(
    name="transformers",
    title="the Trainer of transformers",
    package="transformers",
    releases=">=4.46,<6",
    takes_launchers=True,
    takes_own_names=True,
    log=LogFormat(name="transformers"),
    recognises=_recognises,
    find_files=_find_files,
    read=partial(read_trainer, dialect=_DIALECT),
    overlay=partial(overlay_trainer, dialect=_DIALECT),
    trial_mode=partial(trial_of_trainer, dialect=_DIALECT),
    expected=expected_of,
)
