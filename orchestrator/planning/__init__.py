"""Planning: what may be tried and why the rest is not, its predictions, and what was known before the first trial.

Stands on search, config and space; reads the ledger, but knows nothing of controllers.
"""
