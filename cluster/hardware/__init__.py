"""Nodes, devices, where ranks are placed on them, and the catalogue of accelerators. Imports no other room of
``cluster``."""
