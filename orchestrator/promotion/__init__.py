"""Promotion: what is in production, with evidence, a way back, records of both, and whether it still holds.

Stands above controller and report: a verification is a sweep of its own; knows no command line.
"""
