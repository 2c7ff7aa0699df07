"""Faults injected into whole sweeps on several hosts, and the checker of what becomes of them."""
