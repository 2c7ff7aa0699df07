"""Tensor parallelism by two engines, the split vocabulary, and multi-copy, which hides collectives."""
