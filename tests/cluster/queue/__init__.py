"""Tests of :mod:`cluster.queue`."""
