"""Planning: legal candidates, rejected ones with reasons, predictions, and prior knowledge.

Uses search, config and space; reads the ledger, but does not depend on controllers.
"""
