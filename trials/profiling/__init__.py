"""Records some steps of a trial: traces, times of operators, collectives, graphs. Knows the training loop."""
