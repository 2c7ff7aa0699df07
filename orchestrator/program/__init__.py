"""Users' training programs: reading their command, applying a candidate to it, and the command of a trial.

Knows recipes and the search space; sweep files, plans and controllers stand on it.
"""
