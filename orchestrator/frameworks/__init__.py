"""Other frameworks: a configuration written as their own files or laid over a user's command, and read back.

Knows the specification of trials and the knobs: nothing of sweeps or of what was measured.
"""

from orchestrator.frameworks.catalog import FORMATS, export, export_all, recipe
from orchestrator.frameworks.spelling import Export, Note, Parsed, Recipe

__all__ = ["FORMATS", "Export", "Note", "Parsed", "Recipe", "export", "export_all", "recipe"]
