"""Leases nodes, runs gangs of ranks on them, and predicts what candidates take there. Imports ``trials`` and knows
nothing of sweeps; only the room ``ray`` imports Ray."""
