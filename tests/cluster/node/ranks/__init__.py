"""Tests of :mod:`cluster.node.ranks`, mostly with real processes."""
