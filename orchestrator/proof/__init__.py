"""Proof that a finalist is faster than the baseline and trains the same model: confirmation, loss gate, verdict."""
