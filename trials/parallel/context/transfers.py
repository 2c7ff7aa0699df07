"""Collectives in two halves for code that has its own backward pass: start one, compute, wait for its result.

All go through torch's functional collectives (see :mod:`trials.parallel.collectives`, whose own halves autograd sees)
and work along dimension 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trials.parallel.collectives import Group


def start_gather(x: Tensor, group: Group) -> Tensor:
    """Begin to collect every rank's ``x``."""
    out: Tensor = _ops().all_gather_into_tensor(x.contiguous(), group.size, group.name)
    return out


def start_scatter(x: Tensor, group: Group) -> Tensor:
    """Begin to sum every rank's ``x`` and to give each rank its part."""
    out: Tensor = _ops().reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name)
    return out


def start_rotation(x: Tensor, group: Group) -> Tensor:
    """Begin to send ``x`` to the next rank and to receive that of the previous one.

    It is an exchange in which ranks have nothing to send to all but one: fake process groups and compiled graphs know
    that, pairs of sends and receives they do not.
    """
    sent, received = [0] * group.size, [0] * group.size
    sent[(group.rank + 1) % group.size] = received[(group.rank - 1) % group.size] = x.shape[0]
    out: Tensor = _ops().all_to_all_single(x.contiguous(), received, sent, group.name)
    return out


def arrived(x: Tensor) -> Tensor:
    """Wait for what was started; its result."""
    out: Tensor = _ops().wait_tensor(x)
    return out


def _ops() -> Any:
    return torch.ops._c10d_functional
