"""Tests of :mod:`cluster`: backends, and the gangs and runners that they are tried with."""
