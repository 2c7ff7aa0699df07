"""How a candidate is laid over a command: what has to change is written, read back, compared; knows no framework."""
