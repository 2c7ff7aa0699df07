"""What waits in host memory while the device does not need it: activations, states of the optimiser."""
