"""What tests share: stories of sweeps, files, stores, runners. ``ROOT`` is the checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
