"""What other programs than our own runner keep in device memory: hypotheses that outcomes decide between."""
