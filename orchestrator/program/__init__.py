"""Custom training programs: reading their command, applying a candidate to it, and the command of a trial.

Imports recipes and the search space; sweep files, plans and controllers use it.
"""
