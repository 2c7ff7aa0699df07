"""The cost model against published measurements, and its speed."""
