"""Leases nodes, runs gangs of ranks on them, and predicts candidates' speed and memory. Imports ``trials``, and does
not depend on sweeps. Only the room ``ray`` imports Ray."""
