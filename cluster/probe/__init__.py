"""Measures the nodes of a lease, and what that says of the cost model's coefficients. Imports ``base``, ``cost`` and
``hardware``."""
