"""Profiles of some steps of a trial: traces, operator times, collectives, graphs. Depends on the training loop."""
