"""Predicts step time and peak memory of candidates, and learns from measurements. Imports only ``hardware`` and numpy.

``inputs`` (one row per candidate, and coefficients) -> ``work`` (FLOPs and bytes) -> ``peak_memory`` and ``step_time``
(named terms) -> ``cost_model``, which fits the coefficients to measurements.
"""
