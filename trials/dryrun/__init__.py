"""Peak memory, FLOPs and collective bytes of one rank of a world of any size, found out on a CPU-only machine.

Knows the training loop, which it runs on fake tensors in child processes. ``records``, ``estimate``, ``extrapolate``,
``microbatches`` and ``layer_runs`` need the standard library only.
"""
