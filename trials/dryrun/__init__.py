"""Peak memory, FLOPs and collective bytes of one rank in a world of any size, computed on a CPU-only machine.

Runs the training loop on fake tensors in child processes. ``estimate`` and ``small`` need only the standard library.
"""
