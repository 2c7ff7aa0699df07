"""Records the ledger of a sweep in MLflow, and reads earlier sweeps there to learn from; imports report and below."""
