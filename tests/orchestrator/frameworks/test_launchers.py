"""Launchers' commands, taken apart."""

import pytest

from orchestrator.frameworks.launchers import imports, program_of, without_launcher


@pytest.mark.parametrize(
    ("command", "argv", "world_size"),
    [
        ("torchrun --nproc-per-node 2 train.py --bs 4", "python train.py --bs 4", 2),
        ("/v/bin/torchrun --standalone --nnodes=2 --nproc_per_node=4 -m my.train x", "/v/bin/python -m my.train x", 8),
        ("python3 -u -m torch.distributed.run --nproc-per-node 2 --tee 3 train.py", "python3 -u train.py", 2),
        ("torchrun --no-python --nproc-per-node gpu swift sft", "swift sft", None),
        ("torchrun train.py --nproc-per-node 3", "python train.py --nproc-per-node 3", 1),
        (
            "deepspeed --num_gpus 2 --master_port 29501 train.py --deepspeed ds.json",
            "python train.py --deepspeed ds.json",
            2,
        ),
        ("deepspeed train.py", "python train.py", None),
        ("accelerate launch --config_file a.yaml --num_processes 4 train.py --lr 1", "python train.py --lr 1", 4),
        ("python -m accelerate.commands.launch --multi_gpu train.py", "python train.py", None),
        ("env A=1 numactl -N 0 torchrun --nproc-per-node 2 t.py", "env A=1 numactl -N 0 python t.py", 2),
        ("python train.py --launcher torchrun x", "python train.py --launcher torchrun x", None),
        ("uv run train.py", "uv run train.py", None),
    ],
)
def test_launchers_are_taken_off(command, argv, world_size):
    made = without_launcher(tuple(command.split()))
    assert (" ".join(made.argv), made.world_size) == (argv, world_size)
    program = program_of(made.argv)
    assert (*program.head, *program.arguments) == made.argv


def test_programs_and_their_imports():
    assert program_of(("python", "-u", "src/train.py", "-m", "x")).arguments == ("-m", "x")
    assert program_of(("python", "-m", "swift.cli.sft", "--lr", "1")).name == "swift.cli.sft"
    assert program_of(("llamafactory-cli", "train", "a.yaml")).name == "llamafactory-cli"
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
