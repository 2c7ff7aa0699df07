"""Drafts: first sweep files, for users who have a model and a cluster.

Reads a Hugging Face configuration, detects the hardware, and lets the cost model choose a baseline that fits.
"""
