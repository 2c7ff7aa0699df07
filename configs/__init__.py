"""Data that the packages read at run time: accelerators, clusters, cost priors, models, example sweeps.

``CONFIGS`` is their folder, wherever the package is installed.
"""

from pathlib import Path

CONFIGS = Path(__file__).parent
