"""The sweep file: read, checked, and turned into values of space, proof and workload; its JSON Schema and reference.

Uses the vocabulary of space and sweep; independent of search, proof and execution.
"""
