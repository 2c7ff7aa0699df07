"""The search space: knobs, the candidates they span, rules of legality, names, dominance by memory.

Depends on workloads and hardware, but not on sweeps or their measurements.
"""
