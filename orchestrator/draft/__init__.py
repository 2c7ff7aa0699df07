"""Drafts: first sweep files, written for people who have a model and a cluster.

It reads a Hugging Face configuration, looks at the hardware, and has the cost model choose a baseline that fits.
"""
