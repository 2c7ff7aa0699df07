"""Commands as people write them for five frameworks, after the examples that these ship.

All train the decoder of :data:`tests.orchestrator.frameworks.configurations.MODEL` on a global batch of 96.
"""

import dataclasses
import shlex
from pathlib import Path

from orchestrator.frameworks.catalog import training
from orchestrator.frameworks.edit import OverlayRequest, Run, values_of
from orchestrator.frameworks.spelling import candidate_of
from orchestrator.program.user_program import canonical_reading
from orchestrator.space.space import canonical_part, canonical_precision
from tests.orchestrator.frameworks.configurations import MODEL

BATCH = 96
FOLDER = Path(__file__).parents[2] / "data" / "programs"

MEGATRON = """python pretrain_gpt.py --use-mcore-models --num-layers 8 --hidden-size 64 --ffn-hidden-size 192
    --num-attention-heads 8 --group-query-attention --num-query-groups 4 --kv-channels 8 --seq-length 128
    --max-position-embeddings 128 --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm --init-method-std 0.0134
    --norm-epsilon 1e-6 --attention-backend fused --untie-embeddings-and-output-weights --disable-bias-linear
    --micro-batch-size 1 --global-batch-size 96 --train-samples 1953125 --lr-decay-samples 1949218 --lr 0.00015
    --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
    --empty-unused-memory-level 1 --exit-duration-in-mins 235 --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 320
    --make-vocab-size-divisible-by 32 --split 99,1,0 --num-workers 1 --log-interval 10 --eval-iters 32
    --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
    --ckpt-format torch_dist --distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir tb"""

TITAN_CONFIG = """
from . import model_registry

def small():
    model_spec = model_registry("mine")
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path="./assets",
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(local_batch_size=8, seq_len=128, steps=1000),
        parallelism=ParallelismConfig(pipeline_parallel_schedule="Interleaved1F1B"),
        activation_checkpoint=SelectiveAC.Config(),
    )

def mine():
    config = small()
    config.training.local_batch_size = 2
    config.activation_checkpoint = FullAC.Config()
    config.compile.enable = True
    return config
"""
TITAN = """python -m torchtitan.train --module my.configs --config mine --training.local_batch_size=1
    --training.global_batch_size 96 --parallelism.tensor-parallel-degree 2 --checkpoint.enable
    --metrics.enable_wandb activation-checkpoint:full --activation-checkpoint.preserve-rng-state"""

LIGHTNING_CONFIG = (FOLDER / "config.yaml").read_text(encoding="utf-8")
LIGHTNING = "python main.py fit --config config.yaml --trainer.strategy ddp --model.lr 1e-3 --trainer.max_epochs=3"

MINDFORMERS_CONFIG = (FOLDER / "pretrain.yaml").read_text(encoding="utf-8")
MINDFORMERS = """msrun --worker_num=8 --local_worker_num=8 --master_port=8118 --log_dir=msrun_log --join=False
    run_mindformer.py --config configs/pretrain.yaml --use_parallel True --load_checkpoint /ckpt/other"""

PADDLE_CONFIG = (FOLDER / "pretrain.json").read_text(encoding="utf-8")
PADDLE_MODEL = (FOLDER / "model/config.json").read_text(encoding="utf-8")
PADDLE = """python -u -m paddle.distributed.launch --gpus 0,1,2,3,4,5,6,7 run_pretrain.py ./pretrain.json
    --learning_rate 1e-4"""

_FILES = {
    "torchtitan": {"titan_config": ("my/configs.py", TITAN_CONFIG)},
    "lightning": {"config": ("config.yaml", LIGHTNING_CONFIG)},
    "mindformers": {"config": ("configs/pretrain.yaml", MINDFORMERS_CONFIG)},
    "paddlenlp": {"arguments": ("pretrain.json", PADDLE_CONFIG), "model_config": ("model/config.json", PADDLE_MODEL)},
}
_COMMANDS = {
    "megatron": MEGATRON,
    "torchtitan": TITAN,
    "lightning": LIGHTNING,
    "mindformers": MINDFORMERS,
    "paddlenlp": PADDLE,
}
FRAMEWORKS = tuple(_COMMANDS)


def program(name, *more, without=(), files=None, env=None):
    """The command of a framework, with words added or left out, and with other texts of files."""
    words = [word for word in shlex.split(_COMMANDS[name]) if word not in without]
    given = _FILES.get(name, {})
    return Run(
        argv=(*words, *more),
        cwd="/project",
        env=env or {},
        files={**{key: text for key, (_, text) in given.items()}, **(files or {})},
        paths={key: f"/project/{path}" for key, (path, _) in given.items()},
    )


def request_for(run, name, candidate, **more):
    """What lays a candidate over a command; the layers of torchtitan's model are only in the sweep file."""
    reading = training(name).read(run)
    reading = canonical_reading(reading, as_it_stands(run, name))
    reading = dataclasses.replace(reading, num_layers=reading.num_layers or MODEL.num_layers)
    return OverlayRequest(
        candidate=candidate,
        reading=reading,
        world_size=candidate.layout.world_size,
        global_batch_size=BATCH,
        num_microbatches=max(1, candidate.num_microbatches(BATCH)),
        **more,
    )


def as_it_stands(run, name, num_ranks=8):
    """The candidate that the command amounts to on so many ranks."""
    values = dict(training(name).read(run).values)
    degrees = [values.get(f"layout.{axis}", 1) for axis in ("tp", "pp", "cp", "dp_replicate", "dp_shard")]
    left = num_ranks
    for degree in degrees:
        left //= degree
    rest = "layout.dp_shard" if values.get("layout.zero_stage") else "layout.dp_replicate"
    if rest not in values:
        values[rest] = left
    if values.get("recompute.full") == ((1,),):
        values["recompute.full"] = ((MODEL.num_layers,),)
    return canonical(candidate_of(values))


def canonical(candidate):
    return dataclasses.replace(
        candidate,
        layout=canonical_part(candidate.layout),
        loader=canonical_part(candidate.loader),
        precision=canonical_precision(candidate.precision),
    )


def errors(laid):
    return {note.knob for note in laid.notes if note.severity == "error"}


def run_of(laid, run):
    """The command of an overlay, to be read again."""
    return dataclasses.replace(run, argv=laid.argv, env={**run.env, **laid.env}, files={**run.files, **laid.files})


def differing(run, name, candidate):
    """Fields in which a command differs from a candidate."""
    reading = training(name).read(run)
    requested, parsed = values_of(candidate), reading.values
    known = canonical(candidate_of({**requested, **{path: v for path, v in parsed.items() if path in requested}}))
    found = values_of(known)
    if reading.num_layers is None and parsed.get("recompute.full") and requested["recompute.full"]:
        found["recompute.full"] = requested["recompute.full"]  # all layers, however many there are
    return {path for path in requested if found.get(path) != requested[path]}
