"""What the controller costs as sweeps grow."""
