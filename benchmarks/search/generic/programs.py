"""Ten synthetic training programs: their candidates, and the time of each on a machine that is hidden from the search.

The truth is written for itself and shares nothing with what the search believes: kernels that run in waves of tiles,
element-wise work by bytes, a host that launches ahead, a loader whose workers share cores and a disk, a fixed number of
bytes in flight; constants are drawn again for every seed, and so are effects of pairs of knobs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trials.spec import (
    Candidate,
    CustomChoice,
    ImageFolderData,
    Kernels,
    Layout,
    LinearModel,
    Loader,
    Precision,
    RandomData,
    ResNetModel,
    ScriptData,
    ScriptModel,
    Workload,
)

PAIR_STD = 0.02
"""Standard deviation of the log of what two values of different knobs do together and not alone."""
PRECISIONS = {
    "O0": Precision(),
    "O1": Precision(level="O1", dtype="bfloat16"),
    "O2": Precision(level="O2", dtype="bfloat16"),
}
Values = Mapping[str, Any]
"""Values of a candidate's knobs, by name."""
SCRIPT = ScriptModel(recipe="custom", run=("python", "train.py"), cwd="/code")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a made program runs on and does there: seconds per sample, micro-batch or step, and bytes."""

    flop_s: float
    """Matrix products of a sample in fp32 at full waves."""
    byte_s: float
    """Element-wise work of a sample in fp32."""
    launch_s: float
    """Host time to launch a micro-batch."""
    read_s: float
    """Time of one worker to read a sample."""
    disk_s: float
    """Time of the disk to deliver a sample, whoever reads."""
    cores: float
    step_s: float
    """Fixed time of a step."""
    reduce_s: float = 0.0
    """Reduction of gradients between two ranks."""
    wave: int = 8
    """Samples that fill the device once."""
    low_gain: float = 3.0
    """Speed of 16-bit matrix products."""
    cast_s: float = 0.0
    """Casts of a sample under autocast."""
    tf32_gain: float = 2.0
    fused_share: float = 0.3
    """Share of element-wise work that compilation saves."""
    graph_break_s: float = 0.0
    """What guards and graph breaks of a compiled micro-batch cost."""
    last_gain: float = 0.85
    """Factor of channels-last order on 16-bit convolutions."""
    last_full: float = 1.05
    """The same in fp32."""
    benchmark_gain: float = 0.95
    copy_s: float = 0.0
    """Copy of a sample to the device from pageable memory; a third of it from pinned memory."""
    fixed_bytes: float = 2e9
    sample_bytes: float = 1e8
    limit_bytes: float = 80e9
    shares_cores: bool = False
    """Whether reading and computing use the same cores."""
    own: Mapping[str, Callable[[Any], float]] = field(default_factory=dict)
    """Factor on the time of the device by the value of a custom knob."""


def device_seconds(v: Values, m: Machine) -> float:
    """Time of the device for a step of one rank."""
    size, number = v["micro_batch_size"], v["number"]
    low, full = v.get("precision", "O0") != "O0", v.get("precision", "O0") == "O2"
    waves = math.ceil(size / m.wave) * m.wave
    matmul = waves * m.flop_s / (m.low_gain if low else m.tf32_gain if v.get("tf32") else 1.0)
    if v.get("channels_last"):
        matmul *= m.last_gain if low else m.last_full
    matmul *= m.benchmark_gain if v.get("benchmark") else 1.0
    elementwise = size * m.byte_s * (0.55 if low else 1.0) * (1 - m.fused_share if v.get("compiled") else 1.0)
    casts = size * m.cast_s * (0.4 if full else 1.0) if low else 0.0
    device = matmul + elementwise + casts
    host = m.launch_s * (0.6 if v.get("compiled") else 1.0) + (m.graph_break_s if v.get("compiled") else 0.0)
    micro = max(device, host) + 0.08 * min(device, host)
    if v.get("recompute"):
        micro += 0.31 * micro
    for name, factor in m.own.items():
        micro *= factor(v[name])
    return float(number * micro)


def step_seconds(v: Values, m: Machine) -> float:
    """Time of a step: device, exchange and reading, as far as one hides the other."""
    device, dp = device_seconds(v, m), v.get("dp", 1)
    samples = v["micro_batch_size"] * v["number"]
    visible = max(0.15 * m.reduce_s, m.reduce_s - 0.4 * device / v["number"]) * 2 * (dp - 1) / dp
    gathered = 0.5 * m.reduce_s * v["number"] if v.get("zero_stage") == 3 else 0.0
    busy = device + visible + gathered + m.step_s
    busy += samples * m.copy_s * (0.33 if v.get("pinned") else 1.0)
    workers = v.get("workers", 0)
    if workers == 0:
        return float(busy + samples * (m.read_s + m.disk_s))
    serving = min(workers, m.cores)
    reading = samples * max(m.read_s / (0.85 * serving), m.disk_s * (1 + 0.02 * workers))
    if m.shares_cores:
        busy += samples * m.read_s * 0.8 + 0.01 * workers * busy
    return float(max(busy, reading) + 0.03 * min(busy, reading))


def peak_bytes(v: Values, m: Machine) -> float:
    """Peak memory of a rank."""
    low = v.get("precision", "O0") != "O0"
    states = m.fixed_bytes * (1.1 if low else 1.0)
    if v.get("zero_stage") == 3:
        states /= v["dp"] ** 0.9
    kept = m.sample_bytes * v["micro_batch_size"] * (0.62 if low else 1.0)
    kept *= 0.25 if v.get("recompute") else 1.0
    kept *= 0.9 if v.get("compiled") else 1.0
    return float(states + kept)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A made program with the truth of all its candidates."""

    name: str
    workload: Workload
    device: str
    """The catalogue's name of the device, or cpu."""
    baseline: Candidate
    candidates: tuple[Candidate, ...]
    times_s: Mapping[Candidate, float]
    """Step times of those that fit, without noise."""
    peaks: Mapping[Candidate, float]
    limit_bytes: float


Own = Mapping[str, tuple[str, Mapping[Any, Any]]]
"""Knobs that are arguments of a script: by our name theirs, and what they call those values that we call otherwise."""


def _candidate(v: Values, own: Own) -> Candidate:
    def builtin(name: str, default: Any) -> Any:
        return default if name in own else v.get(name, default)

    dp, workers = v.get("dp", 1), builtin("workers", 0)
    sharded = v.get("zero_stage") == 3 and dp > 1
    chosen = ((name, shown.get(v[knob], v[knob])) for knob, (name, shown) in own.items())
    return Candidate(
        layout=Layout(dp_shard=dp, zero_stage=3) if sharded else Layout(dp_replicate=dp),
        micro_batch_size=v["micro_batch_size"],
        precision=PRECISIONS[builtin("precision", "O0")],
        loader=Loader(
            num_workers=workers, prefetch_factor=2 if workers else 0, pin_memory=bool(builtin("pinned", False))
        ),
        kernels=Kernels(
            compile="model" if builtin("compiled", False) else "off",
            matmul_precision="high" if builtin("tf32", False) else "highest",
            memory_format="nhwc" if builtin("channels_last", False) else "nchw",
            cudnn_tuning_range=(1, 10) if builtin("benchmark", False) else (),
        ),
        own=tuple(CustomChoice(name=f"--{name}", value=value) for name, value in sorted(chosen)),
    )


def make_program(
    name: str,
    machine: Machine,
    choices: Mapping[str, Sequence[Any]],
    *,
    baseline: Values,
    workload: Workload,
    device: str,
    seed: int,
    own: Own | None = None,
) -> Program:
    """The program on a machine whose constants a seed moves by some 20%."""
    rng = random.Random(f"{name}/{seed}")
    constants = {one: value for one, value in vars(machine).items() if one.endswith("_s")}
    moved = replace(machine, **{one: value * math.exp(rng.gauss(0.0, 0.2)) for one, value in constants.items()})
    times_s, peaks, candidates = {}, {}, {}
    for values in itertools.product(*choices.values()):
        v = dict(zip(choices, values, strict=True))
        v["number"] = workload.global_batch_size // (v["micro_batch_size"] * v.get("dp", 1))
        if v["number"] < 1:
            continue
        candidate = _candidate(v, own or {})
        candidates[candidate] = v
        peaks[candidate] = peak_bytes(v, moved)
        if peaks[candidate] <= moved.limit_bytes:
            times_s[candidate] = step_seconds(v, moved) * math.exp(_pairs(v, f"{name}/{seed}"))
    v = {**baseline, "number": workload.global_batch_size // (baseline["micro_batch_size"] * baseline.get("dp", 1))}
    return Program(
        name=name,
        workload=workload,
        device=device,
        baseline=_candidate(v, own or {}),
        candidates=tuple(candidates),
        times_s=times_s,
        peaks=peaks,
        limit_bytes=moved.limit_bytes,
    )


def _pairs(v: Values, seed: str) -> float:
    settings = [f"{name}={value}" for name, value in sorted(v.items()) if name != "number"]
    return sum(
        random.Random(f"{seed}/{one}/{two}").gauss(0.0, PAIR_STD) for one, two in itertools.combinations(settings, 2)
    )


def _images(batch: int) -> Workload:
    return Workload(model=ResNetModel(), data=ImageFolderData(), seq_length=1, global_batch_size=batch)


def _script(batch: int) -> Workload:
    return Workload(model=SCRIPT, data=ScriptData(), seq_length=1, global_batch_size=batch)


def _optimum(best: float, cost: float) -> Callable[[Any], float]:
    """A factor with its least at ``best``, rising with the square of the doublings away from it."""
    return lambda value: 1 + cost * math.log2(float(value) / best) ** 2


_IMAGES: dict[str, Sequence[Any]] = {
    "micro_batch_size": (32, 64, 128, 256),
    "precision": ("O0", "O1"),
    "channels_last": (False, True),
    "workers": (0, 2, 4, 8, 16),
    "benchmark": (False, True),
    "pinned": (False, True),
}
_GPU_IMAGES = Machine(
    flop_s=1.9e-3, byte_s=5e-4, launch_s=2.2e-2, read_s=8e-3, disk_s=1e-5, cores=16, step_s=5e-3, copy_s=4e-5, wave=4,
    low_gain=4.0, last_gain=0.8, sample_bytes=9e7,
)  # fmt: skip


def resnet_compute(seed: int) -> Program:
    """ResNet on one accelerator with many cores: computing counts."""
    machine = replace(_GPU_IMAGES, read_s=1.5e-3)
    base = {"micro_batch_size": 64, "precision": "O0", "channels_last": False, "workers": 4, "benchmark": False}
    return make_program(
        "resnet-compute", machine, _IMAGES, baseline={**base, "pinned": False}, workload=_images(256),
        device="a100-80", seed=seed,
    )  # fmt: skip


def resnet_loader(seed: int) -> Program:
    """The same with few cores and a slow disk: reading counts, and more than ten workers hurt."""
    machine = replace(_GPU_IMAGES, cores=10, disk_s=5e-4)
    base = {"micro_batch_size": 64, "precision": "O1", "channels_last": False, "workers": 2, "benchmark": False}
    return make_program(
        "resnet-loader", machine, _IMAGES, baseline={**base, "pinned": False}, workload=_images(256),
        device="a100-80", seed=seed,
    )  # fmt: skip


def resnet_memory(seed: int) -> Program:
    """ResNet on a small accelerator: large micro-batches do not fit in fp32, the largest not at all."""
    machine = replace(_GPU_IMAGES, read_s=2e-3, limit_bytes=15e9, sample_bytes=1.5e8, launch_s=6e-2)
    base = {"micro_batch_size": 32, "precision": "O0", "channels_last": False, "workers": 4, "benchmark": False}
    return make_program(
        "resnet-memory", machine, _IMAGES, baseline={**base, "pinned": False}, workload=_images(512),
        device="v100-16", seed=seed,
    )  # fmt: skip


def resnet_cpu(seed: int) -> Program:
    """ResNet on two cores: autocast is slower, workers take the cores of computing."""
    machine = Machine(
        flop_s=2.2e-2, byte_s=9e-3, launch_s=8e-3, read_s=1.5e-3, disk_s=1e-5, cores=2, step_s=3e-2, wave=1,
        low_gain=0.9, cast_s=2e-3, last_gain=0.9, last_full=0.8, benchmark_gain=1.0, shares_cores=True,
        limit_bytes=2e9, fixed_bytes=3e8, sample_bytes=3e7,
    )  # fmt: skip
    choices = {**_IMAGES, "micro_batch_size": (4, 8, 16, 32), "workers": (0, 1, 2, 4), "pinned": (False,)}
    base = {"micro_batch_size": 8, "precision": "O0", "channels_last": False, "workers": 2, "benchmark": False}
    return make_program(
        "resnet-cpu", machine, choices, baseline=base, workload=_images(32), device="cpu", seed=seed
    )  # fmt: skip


def linear(seed: int) -> Program:
    """Nothing but matrix products: number formats count, and how full the device is."""
    machine = Machine(
        flop_s=4e-5, byte_s=4e-6, launch_s=4e-3, read_s=1e-7, disk_s=0.0, cores=16, step_s=2e-3, wave=108,
        low_gain=9.0, cast_s=4e-6, tf32_gain=5.0, sample_bytes=6e6, fixed_bytes=1e10,
    )  # fmt: skip
    choices = {
        "micro_batch_size": (128, 256, 512, 1024, 2048),
        "precision": ("O0", "O1", "O2"),
        "tf32": (False, True),
        "compiled": (False, True),
        "workers": (0, 2),
    }
    base = {"micro_batch_size": 512, "precision": "O0", "tf32": False, "compiled": False, "workers": 0}
    model = LinearModel(num_layers=9, size=4096)
    return make_program(
        "linear", machine, choices, baseline=base, device="a100-80", seed=seed,
        workload=Workload(model=model, data=RandomData(), seq_length=1, global_batch_size=2048),
    )  # fmt: skip


def script_vision(seed: int) -> Program:
    """A script that trains on images, with the usual arguments under usual names."""
    machine = replace(_GPU_IMAGES, read_s=6e-3, fused_share=0.35, launch_s=3e-2, cores=12)
    choices = {
        "micro_batch_size": (32, 64, 128, 256),
        "precision": ("O0", "O1"),
        "channels_last": (False, True),
        "workers": (0, 4, 8, 16),
        "compiled": (False, True),
    }
    own: Own = {
        "precision": ("amp", {"O0": False, "O1": True}),
        "channels_last": ("channels-last", {}),
        "workers": ("workers", {}),
        "compiled": ("compile", {}),
    }
    base = {"micro_batch_size": 64, "precision": "O0", "channels_last": False, "workers": 4, "compiled": False}
    return make_program(
        "script-vision", machine, choices, baseline=base, workload=_script(256), device="h100", seed=seed, own=own
    )


def script_text(seed: int) -> Program:
    """A script that trains on text on two cores: what helps accelerators does not help here."""
    machine = Machine(
        flop_s=6e-3, byte_s=3e-3, launch_s=1.2e-2, read_s=2e-5, disk_s=0.0, cores=2, step_s=2e-2, reduce_s=4e-2, wave=1,
        low_gain=1.1, cast_s=3e-3, fused_share=0.25, shares_cores=True, limit_bytes=3e9, fixed_bytes=2e8,
        sample_bytes=1.2e8,
    )  # fmt: skip
    choices = {
        "micro_batch_size": (1, 2, 4, 8, 16, 32),
        "dp": (1, 2),
        "precision": ("O0", "O1"),
        "recompute": (False, True),
        "workers": (0, 1, 2),
        "compiled": (False, True),
    }
    own: Own = {
        "precision": ("dtype", {"O0": "float32", "O1": "bfloat16"}),
        "recompute": ("recompute", {}),
        "workers": ("workers", {}),
        "compiled": ("compile", {}),
    }
    base = {"micro_batch_size": 1, "dp": 2, "precision": "O0", "recompute": True, "workers": 0, "compiled": False}
    return make_program(
        "script-text", machine, choices, baseline=base, workload=_script(64), device="cpu", seed=seed, own=own
    )


def script_own(seed: int) -> Program:
    """A script with unknown arguments: numbers with an optimum between, names, and some without effect."""
    rng = random.Random(f"own/{seed}")
    impl = {"loop": 1.12, "foreach": 1.0, "fused": 0.93}
    engine = dict(zip("abcd", (math.exp(rng.gauss(0.0, 0.15)) for _ in range(4)), strict=True))
    machine = Machine(
        flop_s=2e-3, byte_s=1e-3, launch_s=1e-2, read_s=1e-4, disk_s=0.0, cores=8, step_s=5e-3,
        own={
            "bucket": _optimum(64, 0.025), "tile": _optimum(32, 0.04), "impl": lambda value: impl[value],
            "engine": lambda value: engine[value],
        },
    )  # fmt: skip
    choices = {
        "micro_batch_size": (8, 16, 32),
        "bucket": (4, 16, 64, 256),
        "tile": (8, 16, 32, 64),
        "impl": tuple(impl),
        "engine": tuple(engine),
        "log_every": (1, 10),
    }
    own: Own = {name: (name.replace("_", "-"), {}) for name in choices if name != "micro_batch_size"}
    base = {"micro_batch_size": 8, "bucket": 16, "tile": 16, "impl": "loop", "engine": "a", "log_every": 10}
    return make_program(
        "script-own", machine, choices, baseline=base, workload=_script(32), device="h100", seed=seed, own=own
    )


def script_ranks(seed: int) -> Program:
    """A script on up to eight accelerators with weights that bind memory: sharding, recompute, accumulation."""
    machine = Machine(
        flop_s=9e-3, byte_s=4e-3, launch_s=4e-2, read_s=1e-4, disk_s=0.0, cores=8, step_s=3e-2, reduce_s=1.2e-1,
        low_gain=3.5, fixed_bytes=4.5e10, sample_bytes=2.4e9, wave=2, own={"bucket": _optimum(50, 0.01)},
    )  # fmt: skip
    choices = {
        "micro_batch_size": (1, 2, 4, 8, 16, 32),
        "dp": (2, 4, 8),
        "zero_stage": (0, 3),
        "precision": ("O0", "O1"),
        "recompute": (False, True),
        "bucket": (10, 25, 50, 100),
    }
    own: Own = {
        "precision": ("mixed_precision", {"O0": "no", "O1": "bf16"}),
        "recompute": ("gradient_checkpointing", {}),
        "bucket": ("bucket_cap_mb", {}),
    }
    base = {"micro_batch_size": 2, "dp": 8, "zero_stage": 0, "precision": "O0", "recompute": True, "bucket": 25}
    return make_program(
        "script-ranks", machine, choices, baseline=base, workload=_script(256), device="a100-80", seed=seed, own=own
    )


def script_contrary(seed: int) -> Program:
    """A script in which what usually helps does not: compiling breaks graphs, casts cost, reading shares the cores."""
    machine = Machine(
        flop_s=1e-3, byte_s=2e-3, launch_s=5e-3, read_s=2e-4, disk_s=0.0, cores=2, step_s=1e-2, low_gain=1.2,
        cast_s=1.5e-3, graph_break_s=2e-1, fused_share=0.05, last_gain=1.3, last_full=1.2, shares_cores=True, wave=16,
    )  # fmt: skip
    choices = {
        "micro_batch_size": (16, 32, 48, 64, 96),
        "precision": ("O0", "O1"),
        "channels_last": (False, True),
        "workers": (0, 2, 4, 8),
        "compiled": (False, True),
    }
    own: Own = {
        "precision": ("bf16", {"O0": False, "O1": True}),
        "channels_last": ("channels-last", {}),
        "workers": ("num-workers", {}),
        "compiled": ("compile", {}),
    }
    base = {"micro_batch_size": 16, "precision": "O0", "channels_last": False, "workers": 4, "compiled": True}
    return make_program(
        "script-contrary", machine, choices, baseline=base, workload=_script(192), device="h100", seed=seed, own=own
    )


MADE = (
    resnet_compute,
    resnet_loader,
    resnet_memory,
    resnet_cpu,
    linear,
    script_vision,
    script_text,
    script_own,
    script_ranks,
    script_contrary,
)
"""The made programs, each a function of the seed."""
