"""Dry runs: memory estimates of candidates, simulated without hardware, their cache and the rule made of them."""
