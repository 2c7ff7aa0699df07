"""The controller of one sweep: decides what to do next, executes it, and writes every step to the ledger.

It uses the cluster and all lower layers of the orchestrator (planning, search, proof, tracking); commands start it.
"""
