"""Tests of :mod:`cluster.hardware`."""
