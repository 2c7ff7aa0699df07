"""Measures the trial runner: its steps against a loop written by hand, overlap of communication, tuning of loaders."""
