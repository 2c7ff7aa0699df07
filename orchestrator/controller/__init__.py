"""The controller of one sweep: decides what is to be done next, executes it, and writes every step to the ledger.

It knows the cluster and everything below in the orchestrator (planning, search, proof, tracking); commands start it.
"""
