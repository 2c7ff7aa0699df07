"""Command lines: what is written is read again, and nothing else changes."""

import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.frameworks.arguments import (
    Argument,
    either_dash,
    expanded,
    is_option,
    read,
    read_text,
    remove,
    with_settings,
    write,
)
from orchestrator.frameworks.launchers import imports

KINDS = ("value", "flag", "switch", "list", "assignment")
OTHERS = st.lists(
    st.one_of(
        st.sampled_from(
            ["--other", "--other=1", "-q", "-3", "-1e-3", "", "x y", "config.yaml", "model.lr=1", "--a-b2"]
        ),
        st.text(string.printable, max_size=6),
    ),
    max_size=6,
)
PLAIN = st.text(string.printable, min_size=1, max_size=8).filter(lambda text: not is_option(text))
TEXTS = st.one_of(PLAIN, st.sampled_from(["-1", "-x", "--", "=", "a=b", "--bs", "{out}"]))


def argument_of(kind):
    name = "a.b" if kind == "assignment" else "--a-b"
    return either_dash(name, kind, aliases=("-b",) if kind == "value" else (), negative=("--no-a-b",))


@st.composite
def settings(draw):
    kind = draw(st.sampled_from(KINDS))
    values = {"value": TEXTS, "assignment": TEXTS, "list": st.lists(PLAIN, max_size=3).map(tuple)}
    return argument_of(kind), draw(values.get(kind, st.booleans()))


def given_places(words, argument):
    """The words without those that give the argument."""
    return remove(words, argument)


@given(OTHERS, OTHERS, settings())
def test_a_written_value_is_read_back_and_the_rest_is_unchanged(before, after, setting):
    argument, value = setting
    words = (*before, *after)
    assume(argument.takes != "switch" or "--" not in words)
    written = write(words, argument, value)
    assert read(written, argument) == value
    assert given_places(written, argument) == given_places(words, argument)
    assert write(written, argument, value) == written


@given(OTHERS, settings())
def test_values_already_present_are_unchanged(words, setting):
    argument, _ = setting
    present = read(words, argument)
    if present not in (None, "") and not any(word.startswith("@") for word in words):
        assert write(words, argument, present) == tuple(words)


MICRO = either_dash("--micro-batch-size", aliases=("-b",))


@pytest.mark.parametrize(
    ("words", "value", "written"),
    [
        ("--micro_batch_size 4 --lr 1", "8", "--micro_batch_size 8 --lr 1"),
        ("--lr 1 --micro-batch-size=4", "8", "--lr 1 --micro-batch-size=8"),
        ("-b4 --lr 1", "8", "-b=8 --lr 1"),
        ("--lr 1", "8", "--lr 1 --micro-batch-size 8"),
        ("-b 1 --lr 1 -b 2", "8", "--lr 1 -b 8"),
        ("--lr 1 -- -b 2", "8", "--lr 1 --micro-batch-size 8 -- -b 2"),
        ("-b 8 @args.txt", "8", "@args.txt --micro-batch-size 8"),
        ("--micro-batch-size -1", "-x", "--micro-batch-size=-x"),
    ],
)
def test_a_change_keeps_spelling_and_place(words, value, written):
    assert write(words.split(), MICRO, value) == tuple(written.split())


@pytest.mark.parametrize(
    ("words", "settings", "written"),
    [
        ("--lr 1 --out x", "--no-save --out {out}", "--lr 1 --out {out} --no-save"),
        ("--lr 1 --out x", "--out {out} --no-save", "--lr 1 --out {out} --no-save"),
        ("--quiet --lr 1", "--quiet", "--quiet --lr 1"),
        ("--lr 1", "--seed -1 --no-save --clip -.5", "--lr 1 --seed -1 --no-save --clip -.5"),
        ("--out x --lr 1", "--out=y", "--out y --lr 1"),
        ("--out=x --lr 1", "--out y", "--out=y --lr 1"),
        ("--lr 1", "--out=y", "--lr 1 --out=y"),
        ("--save --lr 1", "--save=false", "--save --lr 1 --save=false"),
        ("1 --lr 1", "--split 8 1 1 --no-save", "1 --lr 1 --split 8 1 1 --no-save"),
        ("a.b=1 c=2", "a.b=3 d=4", "a.b=3 c=2 d=4"),
        ("--lr 1 -- a", "--no-save -o y", "--lr 1 --no-save -o y -- a"),
    ],
)
def test_settings_replace_arguments_or_are_appended(words, settings, written):
    assert " ".join(with_settings(words.split(), settings.split())) == written


def test_flags_are_disabled_by_absence_or_by_a_negative_name():
    plain, both = Argument(name="--fp32", takes="flag"), Argument(name="--fuse", negative=("--no-fuse",), takes="flag")
    assert write(("--fp32", "x"), plain, False) == ("x",)
    assert write(("--fuse", "x"), both, False) == ("--no-fuse", "x")
    assert (read(("--no-fuse", "--fuse"), both), read(("--fuse", "--no-fuse"), both)) == (True, False)
    bf16 = either_dash("--bf16", "switch")
    assert [read(words.split(), bf16) for words in ("--bf16", "--bf16 False x", "--bf16 x", "--bf16=1")] == [
        True,
        False,
        True,
        True,
    ]


def test_lists_end_at_the_next_option_and_files_of_arguments_are_read_in_their_place():
    sizes = Argument(name="--split", takes="list")
    assert read(("--split", "8", "-1", "1", "--x", "2"), sizes) == ("8", "-1", "1")
    assert write(("--split", "8", "1", "--x", "2"), sizes, ("9",)) == ("--split", "9", "--x", "2")
    words = expanded(("@a.txt", "@none", "--c"), {"a.txt": "--micro-batch-size\n2\n"}.get)
    assert (words, read_text(words, MICRO)) == (("--micro-batch-size", "2", "@none", "--c"), "2")


def test_imports_of_a_text():
    text = "import os, torch.nn as nn\n  from transformers import Trainer\n# import x\n"
    assert imports(text) == {"os", "torch", "transformers"}


@pytest.mark.exhaustive
def test_options_without_a_value_are_those_of_the_real_launchers():
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    from orchestrator.frameworks.launchers import _FLAGS

    for name, parser in (("torchrun", get_args_parser()), ("accelerate", launch_command_parser())):
        flags = {word for action in parser._actions if action.nargs == 0 for word in action.option_strings}
        assert {word.replace("_", "-") for word in flags} - {"-h", "--help"} == _FLAGS[name]
