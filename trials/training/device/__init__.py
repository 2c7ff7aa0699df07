"""A rank's device while it trains: how much of its memory is used, its limit, its health."""
