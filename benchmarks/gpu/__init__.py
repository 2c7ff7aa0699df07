"""Measures one machine with accelerators, and tries on it what machines without cannot show. Needs torch and numpy."""
