"""Measures a gang's hardware instead of a candidate. Knows how a gang meets (``parallel.mesh``) and number formats."""
