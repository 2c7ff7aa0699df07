"""Activations that are dropped after the forward pass and computed again. Knows models and how tensors are split."""
