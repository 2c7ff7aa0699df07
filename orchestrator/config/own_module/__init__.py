"""PyTorch modules of the user's, and of transformers, in a sweep file: how they are written, and counted beforehand."""
