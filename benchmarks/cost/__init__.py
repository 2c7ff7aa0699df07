"""Fits the cost model to published measurements, and measures its accuracy and speed. Imports :mod:`cluster`."""
