"""What is in production: promotion with evidence, a way back, records of both, and whether it still holds."""
