"""The gang's device mesh, and one module per way to split a model over it. Knows models and precision."""
