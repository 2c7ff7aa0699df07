"""Mixed precision: autocast with the user's own lists, 16-bit parameters, loss scaling. Knows ``models`` only."""
