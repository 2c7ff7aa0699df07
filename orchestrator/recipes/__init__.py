"""Recipes: a configuration rendered as other frameworks' own files, and read back.

Knows the specification of trials and the knobs: nothing of sweeps or of what was measured.
"""

from orchestrator.recipes.base import Export, Note, Parsed, Recipe
from orchestrator.recipes.registry import FORMATS, export, export_all, recipe

__all__ = ["FORMATS", "Export", "Note", "Parsed", "Recipe", "export", "export_all", "recipe"]
