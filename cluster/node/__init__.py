"""Runs the ranks of gangs on one node: agent, fork server, wardens and the ranks themselves. Imports ``gang``,
``base``, ``hardware`` and ``processes``, and no backend."""
