"""Searches for the best of ten made programs without a cost model of their own, by every sampler of the product."""
