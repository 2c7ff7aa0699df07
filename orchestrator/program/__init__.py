"""Users' training programs: what their command says, what a candidate makes of it, what a trial runs.

Knows recipes and the search space; sweep files, plans and controllers stand on it.
"""
