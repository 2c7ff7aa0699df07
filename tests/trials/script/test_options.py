"""Options are watched in real processes: what is read, what is not, and what cannot be known."""

import json
import textwrap

import pytest

from trials.script.command import ScriptCommand
from trials.script.judge import Judge, NotApplied
from trials.script.report_lines import StepBook
from trials.spec import Protocol

from .hooked import launch

PARSER = """
import argparse, copy, json, os, pickle
p = argparse.ArgumentParser()
p.add_argument("--bs", "-b", type=int, default=8)
p.add_argument("--no-decay", dest="decay", action="store_false")
"""
OWN = "class Own(argparse.Namespace): pass\nargs = p.parse_args(namespace=Own()); print(args.bs)"
SUB = "s = p.add_subparsers().add_parser('fit'); s.add_argument('--lr')\nargs = p.parse_args(['fit']); print(args.lr)"


@pytest.mark.parametrize(
    ("program", "wanted", "unread"),
    [
        ("args = p.parse_args(); print(args.bs)", "--bs", False),
        ("args = p.parse_args(); print(args.bs)", "-b", False),
        ("args = p.parse_args(); print(args.bs)", "--no-decay", True),
        ("args, rest = p.parse_known_args(); print(args.decay)", "--no-decay", False),
        ("print(p.parse_args())", "--bs", True),
        ("args = copy.deepcopy(pickle.loads(pickle.dumps(p.parse_args()))); print(args.decay)", "--bs", True),
        ("args = copy.deepcopy(pickle.loads(pickle.dumps(p.parse_args()))); print(args.bs)", "--bs", False),
        ("print(json.dumps(vars(p.parse_args())))", "--bs", False),
        ("print(getattr(p.parse_args(), 'bs', None))", "--bs", False),
        (OWN, "--no-decay", False),
        (SUB, "--lr", False),
        (SUB, "--bs", True),
        ("p.parse_args()", "--unknown", False),
        ("print(os.environ.get('BATCH'))", "$BATCH", False),
        ("print(os.getenv('OTHER'))", "$BATCH", True),
        ("print(dict(os.environ)['PATH'])", "$BATCH", False),
    ],
)
def test_an_option_that_is_never_read_is_not_applied(tmp_path, program, wanted, unread):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PARSER + program))
    variables = {"TUNE_CLUSTER_VARIABLES": wanted[1:], wanted[1:]: "4"} if wanted.startswith("$") else {}
    (traced,) = launch([str(file)], tmp_path / "report", **variables)
    assert traced.code == 0, traced.errors
    command = ScriptCommand(
        argv=(), cwd="/", protocol=Protocol(), num_devices=1, tokens_per_step=1, samples_per_step=1, options=(wanted,)
    )
    book = StepBook(command)
    for line in traced.lines:
        book.add_report_line(json.dumps(line), origin="rank0.jsonl", arrived_s=0.0)
    assert not book.notes
    judge = Judge(command, book)
    if unread:
        with pytest.raises(NotApplied, match="never reads"):
            judge.check_options()
    else:
        judge.check_options()
