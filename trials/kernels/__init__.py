"""Graph mode (torch.compile) and the choice of kernels. Knows models, parallelism and precision, but no training."""
