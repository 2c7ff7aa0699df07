"""Plain values that a rank reports besides its times. Standard library only; knows nothing else of ``trials``."""
