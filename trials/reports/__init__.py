"""What a rank reports besides its times, as plain values. Standard library only; knows nothing else of ``trials``."""
