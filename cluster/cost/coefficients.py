"""The cost model's coefficients, which no data sheet tells: names, meaning, and priors before any measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cluster.cost.inputs import Array
from configs import CONFIGS

PRIORS_FILE = CONFIGS / "cost" / "priors.json"


@dataclass(frozen=True, slots=True)
class Coefficient:
    """A positive number, a priori ``value`` within a factor of ``exp(spread)`` (one standard deviation)."""

    name: str
    value: float
    spread: float
    meaning: str


TIME = (
    Coefficient("matmul_efficiency", 0.8, 0.25, "share of the peak that large matmuls reach on a 312 TFLOP/s device"),
    Coefficient("peak_exponent", 0.15, 0.5, "how that share falls as the device's peak rises: (peak / 312e12) ** -x"),
    Coefficient("low_precision_gain", 0.75, 0.3, "share of the extra peak below 16 bits that matmuls gain"),
    Coefficient("half_waves", 0.15, 0.7, "tiles of a matmul's result per unit at which it is half as efficient"),
    Coefficient("half_depth", 150.0, 0.7, "length of a matmul's products at which it is half as efficient"),
    Coefficient("misaligned_cost", 2.0, 0.4, "how much longer a matmul takes whose width is no multiple of 8"),
    Coefficient("attention_efficiency", 0.6, 0.4, "efficiency of fused attention's matmuls relative to others"),
    Coefficient("loose_norm_bytes", 80.0, 0.6, "traffic of norms of several kernels, per element of a layer's input"),
    Coefficient("memory_efficiency", 0.7, 0.3, "share of memory bandwidth that element-wise work reaches"),
    Coefficient("host_layer_s", 0.8e-3, 0.8, "host time to launch one layer's forward, backward or repeated pass"),
    Coefficient("link_efficiency", 0.6, 0.4, "share of the fast links' bandwidth that collectives reach"),
    Coefficient("network_efficiency", 0.6, 0.5, "share of the network's bandwidth that collectives reach"),
    Coefficient("collective_latency_s", 30e-6, 0.6, "fixed time of one collective"),
    Coefficient("hop_latency_s", 4e-6, 0.6, "time that each further rank of a ring adds to a collective"),
    Coefficient("transfer_latency_s", 100e-6, 0.8, "fixed time of one transfer between pipeline stages"),
    Coefficient("gradient_overlap", 0.5, 0.6, "share of the last backward pass that hides gradient reduction"),
    Coefficient("gather_overlap", 0.8, 0.4, "share of computation that hides ZeRO-3 gathering and copies' collectives"),
    Coefficient("overlap_slowdown", 0.2, 0.4, "what computation loses to communication it hides, relative to that"),
    Coefficient("recompute_cost", 1.0, 0.15, "a repeated forward pass relative to the first"),
    Coefficient("step_overhead_s", 10e-3, 0.8, "fixed host time of an optimiser step"),
    Coefficient("scale_overhead", 0.01, 0.8, "share of the step lost per doubling of the number of nodes"),
    Coefficient("read_s", 50e-6, 1.0, "storage time of one record, all ranks together; shared file systems give 20k/s"),
    Coefficient(
        "expert_efficiency", 0.8, 0.3, "efficiency of routed experts' matmuls relative to others of that shape"
    ),
)

MEMORY = (
    Coefficient("state_factor", 1.0, 0.15, "weights, gradients and optimiser states relative to their sum of bytes"),
    Coefficient("activation_factor", 1.0, 0.12, "kept activations relative to the operator-by-operator sum"),
    Coefficient("pipeline_held", 1.0, 0.4, "micro-batches that a pipeline rank holds relative to its schedule's"),
    Coefficient("head_factor", 1.0, 0.5, "logits and their gradients relative to one 16-bit and two fp32 copies"),
    Coefficient("workspace_bytes", 2.0, 0.8, "an optimiser step's intermediate results, per parameter that it updates"),
    Coefficient("constant_bytes", 1.5e9, 0.5, "device context and communicators, outside the framework's allocator"),
    Coefficient("fragmentation", 0.05, 0.8, "memory reserved but not allocated, relative to the allocated"),
)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Values of a group of coefficients, as logarithms in the group's order.

    ``log_values`` has shape (coefficients,); or (coefficients, n), where each of n candidates has values of its own:
    then ``k["name"]`` is an array of shape (n,), and what it is multiplied with must be of that shape as well.
    """

    group: tuple[Coefficient, ...]
    log_values: Array
    _values: dict[str, Array | float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = np.exp(self.log_values)
        each = values.tolist() if values.ndim == 1 else values
        object.__setattr__(self, "_values", dict(zip((c.name for c in self.group), each, strict=True)))

    def __getitem__(self, name: str) -> Array | float:
        return self._values[name]

    def index(self, name: str) -> int:
        return next(i for i, coefficient in enumerate(self.group) if coefficient.name == name)


def assumed(group: tuple[Coefficient, ...]) -> Coefficients:
    """The values that this file assumes, before any measurement."""
    return Coefficients(group, np.log([coefficient.value for coefficient in group]))


@dataclass(frozen=True, slots=True)
class Prior:
    """Normal distribution of log coefficients over (source, software, hardware); ``noise`` is what is left
    unexplained: the standard deviation of log(measured / predicted) inside a source.
    """

    group: tuple[Coefficient, ...]
    mean: Array
    covariance: Array
    noise: float

    @property
    def coefficients(self) -> Coefficients:
        return Coefficients(self.group, self.mean)


def assumed_prior(group: tuple[Coefficient, ...], noise: float) -> Prior:
    """The prior that this file assumes, without published measurements."""
    return Prior(group, assumed(group).log_values, np.diag([c.spread**2 for c in group]), noise)


def load_prior(kind: str, without: str | None = None, path: Path = PRIORS_FILE) -> Prior:
    """The prior fitted to published measurements, for ``kind`` ``time`` or ``memory``.

    ``without`` leaves out what one source taught, for judging the model on that source.
    """
    table: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))[kind]
    entry = table["without"].get(without, table["all"]) if without else table["all"]
    group = {"time": TIME, "memory": MEMORY}[kind]
    values, spreads = np.array([entry["coefficients"].get(c.name, [c.value, c.spread]) for c in group]).T
    places = {coefficient.name: i for i, coefficient in enumerate(group)}
    stored = [places.get(name) for name in entry["coefficients"]]
    correlation = np.eye(len(group))
    for i, row in zip(stored, entry["correlations"], strict=True):
        for j, value in zip(stored, row, strict=False):
            if i is not None and j is not None:
                correlation[i, j] = correlation[j, i] = value
    return Prior(group, np.log(values), correlation * np.outer(spreads, spreads), table["noise"])
