"""Measurements of the service against its peers and its own promises; each prints ratios."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
