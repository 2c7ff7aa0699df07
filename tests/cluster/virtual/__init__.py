"""Tests of :mod:`cluster.virtual`."""
