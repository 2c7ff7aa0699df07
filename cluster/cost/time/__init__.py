"""Seconds of one optimiser step (``step``) from kernels, collectives and links. Imports the rest of ``cost``."""
