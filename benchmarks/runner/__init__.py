"""The trial runner against the loop one would write by hand."""
