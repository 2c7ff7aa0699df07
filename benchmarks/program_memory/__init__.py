"""How well the peak memory of custom programs is predicted from their first trials."""
