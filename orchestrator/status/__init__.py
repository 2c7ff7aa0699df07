"""The state of sweeps, seen from outside the controller: overviews, explanations of trials, logs, following. Uses
snapshots (`sweep`) and `report`, not the controller."""
