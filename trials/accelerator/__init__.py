"""Kinds of devices, and the one place where they differ: all other code asks here. ``kinds`` needs no torch."""
