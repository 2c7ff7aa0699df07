"""Tests of :mod:`cluster.probe`."""
