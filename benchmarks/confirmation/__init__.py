"""How often confirmation names a winner that is not faster, against other ways to confirm."""
