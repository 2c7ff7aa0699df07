"""Kinds of devices and all differences between them; other code calls this package. ``kinds`` does not need torch."""
