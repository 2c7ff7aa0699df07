"""The ranks of one gang on one node: their processes, their clocks, and their second run."""
