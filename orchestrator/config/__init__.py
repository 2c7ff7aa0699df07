"""The sweep file: read, checked, and turned into values of space, proof and workload; its JSON Schema and reference.

Knows the words of space and sweep, but nothing of searching, proving or running.
"""
