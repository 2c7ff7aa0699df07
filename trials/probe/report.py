"""A probe's rates in the report that every rank of every gang gives. Standard library only."""

from __future__ import annotations

from trials.outcome import RankReport, StepBreakdown
from trials.reports.findings import Findings
from trials.reports.rates import RankRates


def probe_report(rates: RankRates, *, world_size: int, duration_s: float) -> RankReport:
    """Nothing was trained: the one step is the probe itself."""
    return RankReport(
        rank=rates.rank,
        world_size=world_size,
        tokens_per_step=1,
        step_times_s=(duration_s,),
        breakdown=StepBreakdown(),
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
        num_warmup_steps=0,
        losses=(),
        grad_norms=(),
        model_flops_per_token=0.0,
        findings=Findings(rates=(rates,)),
    )
