"""Profiles of some steps of a trial: traces, operator times, collectives, graphs. Knows the training loop."""
