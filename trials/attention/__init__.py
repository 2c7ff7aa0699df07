"""Causal attention: which kernel computes it on a device, the kernels with their log-sum-exp, pieces put together."""
