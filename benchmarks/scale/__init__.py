"""Measures what the controller costs as sweeps grow. Imports the orchestrator."""
