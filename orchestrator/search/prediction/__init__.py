"""Prediction: time and memory expected of candidates, by the cost model and by what was measured.

Knows nothing of samplers: the other modules of search stand on it.
"""
