"""Peak memory, FLOPs and collective bytes of one rank of a world of any size, on a CPU-only machine.

``records``, ``runs``, ``extrapolate`` and ``child`` are standard library only; the others import torch and run in a
child process.
"""
