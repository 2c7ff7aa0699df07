"""Stands for a user's program: what is read of it is its command."""
