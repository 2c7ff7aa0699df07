"""Draws a workload, a cluster and a search space, and lists the legal candidates by the product's own rules."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.search.made.shapes import (
    CARDS,
    DEVICES_PER_NODE,
    FOREIGN_EXTRAS,
    NODES,
    RECIPES,
    RUNNER_EXTRAS,
    RUNNER_LAYOUT,
    SEQ_LENGTHS,
    SIZES,
)
from cluster.hardware.topology import Topology, catalogue, uniform_topology
from orchestrator.config.settings import BaselineSection, SpaceSection
from orchestrator.space.rules import Filters, first_broken, rules_for
from orchestrator.space.space import Rest, make_space
from trials.spec import Candidate, LlamaModel, ScriptModel, TextData, Workload

MIN_CANDIDATES, MAX_CANDIDATES = 50, 2000
MAX_EXTRAS = 4
"""Knobs beyond layout, micro-batch and recompute that are tried as part of a space."""
STATE_BYTES = 16
"""Bytes of weights, gradients and optimiser states per parameter, roughly; for drawing how many cards a model takes."""
STATES_SHARE = 0.012, 0.55
"""What these bytes may take of all cards together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One drawn tuning task, before its truth: what is trained on what, and what may be varied."""

    workload: Workload
    """As the product sees it: a decoder that our runner trains, or a program of another framework."""
    model_name: str
    card: str
    num_nodes: int
    candidates: tuple[Candidate, ...]

    @property
    def model(self) -> LlamaModel:
        model = self.workload.model
        shape = model.shape if isinstance(model, ScriptModel) else model
        assert isinstance(shape, LlamaModel)
        return shape

    @property
    def decoder_workload(self) -> Workload:
        """The workload as the cost model takes it."""
        return replace(self.workload, model=self.model)

    def topology(self, memory_bytes: float) -> Topology:
        """Its nodes, with so much memory on every card."""
        return _topology(self.card, self.num_nodes, memory_bytes)


def draw(rng: random.Random, size: str, *, is_foreign: bool) -> Setup | None:
    """A task of that size class; None where the draw has too few or too many candidates."""
    model_name, model = rng.choice(list(SIZES[size].items()))
    card = rng.choice(list(CARDS))
    nodes = [number for number in NODES if _is_fair(model, card, number)]
    if not nodes:
        return None
    num_nodes = rng.choice(nodes)
    dp_batch = rng.choice([1, 2, 4, 8]) * num_nodes * DEVICES_PER_NODE
    workload = Workload(
        model=model,
        data=TextData(),
        seq_length=rng.choice(SEQ_LENGTHS),
        global_batch_size=max(16, min(dp_batch, 2048)),
    )
    recipe = rng.choice(list(RECIPES)) if is_foreign else None
    if recipe is not None:
        workload = replace(workload, model=_script(model, recipe))
    candidates = _some(rng, workload, card, num_nodes, recipe)
    if not MIN_CANDIDATES <= len(candidates) <= MAX_CANDIDATES:
        return None
    return Setup(workload=workload, model_name=model_name, card=card, num_nodes=num_nodes, candidates=candidates)


def num_parameters(model: LlamaModel) -> float:
    """Weights of layers and both tables."""
    head_dim = model.hidden_size // model.num_heads
    attention = 2 * model.hidden_size * (model.hidden_size + model.num_kv_heads * head_dim)
    return model.num_layers * (attention + 3 * model.hidden_size * model.ffn_hidden_size) + 2 * (
        model.vocab_size * model.hidden_size
    )


def _is_fair(model: LlamaModel, card: str, num_nodes: int) -> bool:
    memory = catalogue()[card].usable_memory_bytes * num_nodes * DEVICES_PER_NODE
    least, most = STATES_SHARE
    return least <= STATE_BYTES * num_parameters(model) / memory <= most


def _script(model: LlamaModel, recipe: str) -> ScriptModel:
    run = ("python", "train.py")
    return ScriptModel(recipe=recipe, run=run, cwd="/", num_layers=model.num_layers, shape=model)


def _some(
    rng: random.Random, workload: Workload, card: str, num_nodes: int, recipe: str | None
) -> tuple[Candidate, ...]:
    """Legal candidates of a drawn space: the layout and micro-batches, and further knobs as long as it stays small."""
    wanted = round(2 ** rng.uniform(6.3, 10.8))
    space = _layout_knobs(recipe)
    space["precision"] = [_precisions(card)[0]]
    candidates = legal(workload, card, num_nodes, space, MAX_CANDIDATES)
    extras = dict(RUNNER_EXTRAS if recipe is None else FOREIGN_EXTRAS)
    if "precision" in extras:
        extras["precision"] = _precisions(card)
    for name in rng.sample(list(extras), MAX_EXTRAS):
        if len(candidates) * 1.2 > wanted:
            break
        wider = legal(workload, card, num_nodes, {**space, name: extras[name]}, wanted)
        if len(candidates) < len(wider) <= wanted:
            space, candidates = {**space, name: extras[name]}, wider
    return candidates


def _layout_knobs(recipe: str | None) -> dict[str, Any]:
    """Knobs of every space; data parallelism takes up the devices that are left."""
    layout = RUNNER_LAYOUT if recipe is None else RECIPES[recipe]
    space: dict[str, Any] = {name: list(values) for name, values in layout.items()}
    space["micro_batch_size"] = [1, 2, 4, 8]
    if len(space["pp"]) > 1:
        space["schedule"] = ["1f1b", "interleaved"]
    return space


def _precisions(card: str) -> list[Any]:
    number_format = CARDS[card][1]
    return [{"level": level, "dtype": number_format} for level in ("O2", "O1")]


def legal(workload: Workload, card: str, num_nodes: int, space: Mapping[str, Any], limit: int) -> tuple[Candidate, ...]:
    """Candidates that the product's rules let through, on all devices; no more than one beyond ``limit``."""
    section = SpaceSection.model_validate(dict(space))
    rest = Rest(num_nodes * DEVICES_PER_NODE)
    choices = {**section.choices(BaselineSection().values()), "dp_shard": (rest,), "dp_replicate": (rest,)}
    if section.dp_replicate is not None:
        choices["dp_replicate"] = (rest, *section.dp_replicate)
    found = make_space(choices, workload.model)
    topology = _topology(card, num_nodes, catalogue()[card].usable_memory_bytes)
    table = found.table()
    broken = first_broken(rules_for(Filters(whole_lease=True)), table, workload, topology)
    return tuple(table[row] for row in np.flatnonzero(broken < 0)[: limit + 1].tolist())


def _topology(card: str, num_nodes: int, memory_bytes: float) -> Topology:
    return uniform_topology(num_nodes, DEVICES_PER_NODE, device_name=CARDS[card][0], memory_bytes=int(memory_bytes))
