"""Tests of :mod:`cluster.cost`."""
