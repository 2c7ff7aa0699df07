"""Proof that a finalist is faster than the baseline and trains the same model: confirmation, loss gate, verdict.

Reads a sweep's state and determines the next check. Runs the user's evaluation, but launches no gang and does not
depend on controllers.
"""
