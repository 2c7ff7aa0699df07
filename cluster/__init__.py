"""Leases nodes and runs gangs of ranks on them. Imports ``trials`` and knows nothing of sweeps; only the room ``ray``
imports Ray."""
