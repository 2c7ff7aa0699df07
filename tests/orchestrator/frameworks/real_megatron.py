"""What Megatron-LM makes of exported arguments: ``python -m tests.orchestrator.frameworks.real_megatron FOLDER``.

In a separate process, because importing Megatron-LM changes the environment, the log and the warnings. Each folder in
FOLDER holds one export; printed is, per folder, what parser, checks and model configuration understood. There are no
GPUs: the checks only query their compute capability.
"""

import contextlib
import json
import os
import re
import sys
import typing
from pathlib import Path

from orchestrator.frameworks import shell

if not hasattr(typing, "override"):  # Python 3.12
    typing.override = lambda function: function

WITHOUT_TRANSFORMER_ENGINE = ("--no-rope-fusion", "--no-persist-layer-norm")


def main(folder):
    with contextlib.redirect_stdout(sys.stderr):
        import torch

        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.get_device_properties = lambda *_: type("Properties", (), {"major": 9, "minor": 0})
        values = {path.name: _understood(path / "megatron.sh") for path in sorted(Path(folder).iterdir())}
    print(json.dumps(values))


def _understood(script):
    from megatron.training import arguments

    text = script.read_text()
    values = shell.load(text)
    os.environ |= {"WORLD_SIZE": str(values.pop(shell.WORLD_SIZE)), "RANK": "0", "LOCAL_RANK": "0"}
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ |= dict(re.findall(r"^export (\w+)=(\w+)$", text, flags=re.MULTILINE))
    words = [word for name, value in values.items() for word in (name, *_values(value))]
    sys.argv = ["pretrain_gpt.py", *words, "--train-iters", "10", "--mock-data", *WITHOUT_TRANSFORMER_ENGINE]
    args = arguments.parse_args()
    arguments.validate_args(args)
    config = arguments.core_transformer_config_from_args(args)
    return {
        "layout.tp": config.tensor_model_parallel_size,
        "layout.pp": config.pipeline_model_parallel_size,
        "layout.cp": config.context_parallel_size,
        "layout.sequence_parallel": config.sequence_parallel,
        "layout.num_virtual_stages": config.virtual_pipeline_model_parallel_size or 1,
        "layout.dp_replicate": args.num_distributed_optimizer_instances
        if args.use_distributed_optimizer
        else args.data_parallel_size,
        "micro_batch_size": args.micro_batch_size,
        "precision.dtype": str(config.params_dtype).removeprefix("torch."),
        "recompute": [config.recompute_granularity, config.recompute_num_layers],
        "workload.global_batch_size": args.global_batch_size,
        "workload.model.llama.num_layers": config.num_layers,
        "workload.model.llama.num_kv_heads": config.num_query_groups,
        "workload.model.llama.vocab_size": args.padded_vocab_size,
        "workload.model.llama.norm_eps": config.layernorm_epsilon,
        "workload.optimizer.beta2": args.adam_beta2,
    }


def _values(value):
    return () if value is True else value if isinstance(value, list) else (value,)


if __name__ == "__main__":
    main(sys.argv[1])
