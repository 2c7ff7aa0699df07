"""What frameworks print about their steps, one parser each: lines in, records out, nothing else."""

from __future__ import annotations

from collections.abc import Callable

from trials.script.command import LogFormat
from trials.script.logs.base import LogParser, NoParser
from trials.script.logs.deepspeed import DeepSpeedLog
from trials.script.logs.hugging_face import HuggingFaceLog
from trials.script.logs.lightning import LightningLog
from trials.script.logs.megatron import MegatronLog
from trials.script.logs.mindformers import MindFormersLog
from trials.script.logs.paddlenlp import PaddleLog
from trials.script.logs.pattern import PatternLog
from trials.script.logs.torchtitan import TorchTitanLog

PARSERS: dict[str, Callable[[LogFormat], LogParser]] = {
    "none": lambda _: NoParser(),
    "pattern": PatternLog,
    "megatron": lambda _: MegatronLog(),
    "torchtitan": lambda _: TorchTitanLog(),
    "deepspeed": lambda _: DeepSpeedLog(),
    "transformers": lambda _: HuggingFaceLog(),
    "accelerate": lambda _: HuggingFaceLog(),
    "llamafactory": lambda _: HuggingFaceLog(),
    "ms_swift": lambda _: HuggingFaceLog(),
    "lightning": lambda _: LightningLog(),
    "mindformers": lambda _: MindFormersLog(),
    "paddlenlp": lambda _: PaddleLog(),
}
"""Parser of each :attr:`trials.script.command.LogFormat.name`; every stream of lines gets one of its own."""


def make_parser(log: LogFormat) -> LogParser:
    """A parser for one stream of lines.

    Raises:
        ValueError: there is no such format, or its pattern is none.
    """
    if (make := PARSERS.get(log.name)) is None:
        raise ValueError(f"no log format is called {log.name!r}; there are {', '.join(sorted(PARSERS))}")
    return make(log)
