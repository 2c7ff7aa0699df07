"""The gang's device mesh, and one module per way to split a model over it. Depends on models and precision."""
