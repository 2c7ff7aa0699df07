"""Writes the ledger of a sweep into MLflow, and reads there what earlier sweeps taught; imports report and below."""
