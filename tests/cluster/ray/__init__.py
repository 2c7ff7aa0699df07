"""Tests of :mod:`cluster.ray`, with a real Ray."""
