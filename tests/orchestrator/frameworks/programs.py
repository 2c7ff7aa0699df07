"""Commands of programs as people write them, candidates laid over them, and their readings afterwards."""

from pathlib import Path

from orchestrator.frameworks.catalog import training
from orchestrator.frameworks.edit import OverlayRequest, Run
from trials.spec import (
    Candidate,
    Kernels,
    Layout,
    Loader,
    Precision,
    Recompute,
)

DEEPSPEED = """\
{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
 "zero_optimization": {"stage": 2, "overlap_comm": true}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
"""
NUMBERS = """\
{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": 16,
 "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e7}, "bf16": {"enabled": true},
 "tensorboard": {"enabled": true, "output_path": "runs"}}
"""
ARGS = """\
# as of last week
output_dir: runs/one
per_device_train_batch_size: 4
learning_rate: 1e-5
bf16: yes
deepspeed: ds.json
report_to: [wandb]
"""
FSDP = '{"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": true}'
LAUNCH = """\
distributed_type: FSDP
num_processes: 2
mixed_precision: bf16
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_reshard_after_forward: true}
"""
FACTORY = """\
model_name_or_path: model
stage: pt
dataset: own
cutoff_len: 128
output_dir: saves
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1e-5
"""
LOOP = """\
import argparse
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--num-workers", type=int, default=0)
with Accelerator().accumulate(model): ...
"""
TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
ENGINE = "import deepspeed\nengine, *_ = deepspeed.initialize()\n"
MODEL = """\
{"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 128, "vocab_size": 512}
"""
FILES = {
    "ds.json": DEEPSPEED,
    "numbers.json": NUMBERS,
    "args.yaml": ARGS,
    "fsdp.json": FSDP,
    "launch.yaml": LAUNCH,
    "factory.yaml": FACTORY,
    "trainer.py": TRAINER,
    "loop.py": LOOP,
    "engine.py": ENGINE,
    "model/config.json": MODEL,
}
COMMANDS = {
    "transformers": "torchrun --nproc-per-node 2 trainer.py --output_dir o --per-device-train-batch-size=4 --bf16",
    "transformers-zero": "python trainer.py --output_dir o --per_device_train_batch_size 4 --deepspeed ds.json --bf16",
    "transformers-file": "python trainer.py args.yaml",
    "transformers-fsdp": "python trainer.py --fsdp full_shard --fsdp_config fsdp.json --bf16 --output_dir o",
    "transformers-launch": "accelerate launch --config_file launch.yaml trainer.py --output_dir o",
    "accelerate": "python loop.py --batch 2",
    "accelerate-launch": "accelerate launch --config_file launch.yaml loop.py --batch 2",
    "deepspeed": "deepspeed --num_gpus 2 engine.py --deepspeed --deepspeed_config numbers.json",
    "llamafactory": "llamafactory-cli train factory.yaml learning_rate=1e-4",
    "ms-swift": "swift sft --model model --deepspeed zero2 --bf16 true --per_device_train_batch_size 2",
    "ms-swift-file": "swift pt factory.yaml --bf16 true",
}
"""Commands by recipe and kind."""


def recipe_of(kind):
    return next(name for name in ("ms-swift", kind.partition("-")[0]) if kind.startswith(name))


def written(folder):
    """The files in a folder."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def program(kind, folder, **env):
    """The framework's training and the command with the files that its arguments point to."""
    known, argv = training(recipe_of(kind)), tuple(COMMANDS[kind].split())
    paths = known.find_files(argv, str(folder))
    files = {name: Path(path).read_text() for name, path in paths.items()}
    return known, Run(argv=argv, cwd=str(folder), env=env, files=files, paths=paths)


def request(known, run, candidate, *, total=16, named=(), world=2):
    return OverlayRequest(
        candidate=candidate,
        reading=known.read(run),
        named=frozenset(named),
        world_size=world,
        global_batch_size=total,
        num_microbatches=total // (candidate.micro_batch_size * candidate.layout.dp),
    )


def errors(laid):
    return {note.knob: note.message for note in laid.notes if note.severity == "error"}


def layers(number, policy=True):
    return Recompute(full=((number,),)) if policy else Recompute()


def drawn(rng, num_layers):
    """A candidate on two ranks, of knobs that programs on the Trainer have."""
    stage, level = rng.choice([0, 1, 2, 3]), rng.choice(["O0", "O1", "O2"])
    workers = rng.choice([0, 2])
    return Candidate(
        layout=Layout(dp_shard=2, zero_stage=stage) if stage else Layout(dp_replicate=2),
        micro_batch_size=rng.choice([1, 2, 4]),
        recompute=layers(num_layers, rng.random() < 0.5),
        precision=Precision() if level == "O0" else Precision(level=level, dtype="bfloat16"),
        loader=Loader(
            num_workers=workers,
            prefetch_factor=rng.choice([2, 4]) if workers else 0,
            persistent_workers=bool(workers) and rng.random() < 0.5,
            pin_memory=rng.random() < 0.5,
        ),
        kernels=Kernels(
            compile=rng.choice(["off", "model"]), matmul_precision=rng.choice(["highest", "high"]), attention="auto"
        ),
    )
