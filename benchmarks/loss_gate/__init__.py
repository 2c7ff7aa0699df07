"""Limits of the loss gate: legitimate differences and deliberate bugs."""
