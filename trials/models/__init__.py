"""The models a workload can name."""
