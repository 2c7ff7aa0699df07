"""Legality rules on what waits in host memory. Standard library only.

States of the optimiser go with everything: the update is element by element, and the host has all that it needs.

Activations are moved layer by layer, by hooks around a layer's call on what
autograd saves in it: whatever else decides there what is kept, or makes one graph of several layers, excludes that.
"""

from __future__ import annotations

from trials.legality.layout import make_rules
from trials.spec import Candidate, Workload


def _selective(_workload: Workload, candidate: Candidate) -> str | None:
    """Selective recompute decides by itself what is kept of a tensor, so there is nothing whole to copy."""
    recompute = candidate.recompute
    if not candidate.offload.activations or not (recompute.selective or recompute.communication):
        return None
    return "offload_activations goes with full recompute, not with that of selected operators or of communication"


def _compile_model(_workload: Workload, candidate: Candidate) -> str | None:
    if not candidate.offload.activations or candidate.kernels.compile != "model":
        return None
    return "offload_activations moves what single layers keep, and compile model makes one graph of all; use block"


def _cuda_graphs(_workload: Workload, candidate: Candidate) -> str | None:
    kernels = candidate.kernels
    if kernels.compile == "off" or kernels.compile_mode != "reduce-overhead" or not candidate.offload.activations:
        return None
    return "compile_mode reduce-overhead (CUDA graphs) keeps activations in memory of its own: no offload_activations"


OFFLOAD_RULES = make_rules(
    ("offload-with-selective", "offload recompute", _selective),
    ("offload-with-compile-model", "offload kernels.compile", _compile_model),
    ("offload-with-cuda-graphs", "offload kernels.compile kernels.compile_mode", _cuda_graphs),
)
