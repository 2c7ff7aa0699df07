"""Tests of :mod:`cluster.ray`, mostly with a real Ray."""
