"""Why a sweep's trials are as fast as they are: where the step time goes, what holds it back, which knob matters.

:func:`explain_sweep` is pure; :func:`explain_ledger` reads what it needs from a sweep's ledger.
"""

from orchestrator.diagnosis.explain import Basis, explain_sweep
from orchestrator.diagnosis.load import explain_ledger, load_basis
from orchestrator.diagnosis.values import (
    Bottleneck,
    Diagnosis,
    Importance,
    KnobEffect,
    KnobImportance,
    Part,
    Predicted,
    Predictions,
    Remedy,
    StepParts,
    SweepExplanation,
)

__all__ = [
    "Basis",
    "Bottleneck",
    "Diagnosis",
    "Importance",
    "KnobEffect",
    "KnobImportance",
    "Part",
    "Predicted",
    "Predictions",
    "Remedy",
    "StepParts",
    "SweepExplanation",
    "explain_ledger",
    "explain_sweep",
    "load_basis",
]
