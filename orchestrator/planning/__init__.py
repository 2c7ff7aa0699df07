"""Planning: legal candidates, why others are rejected, predictions, and prior knowledge.

Uses search, config and space; reads the ledger, but does not depend on controllers.
"""
