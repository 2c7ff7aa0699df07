"""Predicts step time and peak memory of candidates, and learns from measurements. Imports ``hardware`` only; numpy.

``inputs`` (one row per candidate) -> ``work`` (FLOPs and bytes) -> ``memory`` and ``time`` (named terms, with
``coefficients``) -> ``estimate``; ``calibrate`` fits the coefficients to measurements.
"""
