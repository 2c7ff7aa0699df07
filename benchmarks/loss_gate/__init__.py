"""Measures the loss gate: how far legitimate runs differ, and which deliberate bugs it catches."""
