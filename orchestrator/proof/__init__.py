"""Proof that a finalist is faster than the baseline and trains the same model: confirmation, loss gate, verdict.

Reads a sweep's state and says what to check next; runs the user's evaluation, but launches no gang and knows no
controllers.
"""
