"""Tests of :mod:`cluster.gang`, without processes."""
