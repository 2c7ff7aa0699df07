"""Tests of :mod:`cluster.node`, mostly with real processes."""
