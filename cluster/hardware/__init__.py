"""Nodes, devices, the placement of ranks on them, and the catalogue of accelerators. Imports no other room of
``cluster``."""
