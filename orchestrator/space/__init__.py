"""The search space: knobs, the candidates they span, rules of legality, names, dominance by memory.

Knows workloads and hardware, but no sweep: nothing here depends on what its trials measured.
"""
