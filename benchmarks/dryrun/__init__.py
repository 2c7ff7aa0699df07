"""Compares the dry run's memory with what ranks really allocate."""
