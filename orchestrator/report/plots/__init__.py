"""Plots of a sweep, drawn with matplotlib from the values of a report."""
