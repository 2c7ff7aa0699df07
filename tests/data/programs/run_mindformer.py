"""Stands for a program of the user's own: what is read of it is its command."""
