"""Trains and measures one candidate: torch lives here; ray, optuna and mlflow do not."""
