"""Promotion: production versions with evidence, rollback, history, and verification.

Uses controller and report, since a verification is a sweep; does not depend on the command line.
"""
