"""Clusters without processes, in virtual time: simulated by the cost model, or replayed from published measurements.
Imports ``gang``, ``probe``, ``base``, ``cost``, ``queue`` and ``hardware``."""
