"""Which specifications the runner can train: rules with reasons. Knows ``spec`` and ``failure``; needs no torch."""
