"""Samplers against each other on published tables."""
