"""The user's own code, as ranks find it. Standard library only."""
