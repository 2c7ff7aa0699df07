"""Where sweeps stand, for whoever asks from outside: overviews, explanations of trials, logs, following. Knows
snapshots (`sweep`) and what `report` makes of a state; not the controller."""
