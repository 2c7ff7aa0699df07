"""The winner as other frameworks' configuration."""

from orchestrator.recipes.base import Export, Note, Parsed, Recipe
from orchestrator.recipes.registry import FORMATS, export, export_all, recipe

__all__ = ["FORMATS", "Export", "Note", "Parsed", "Recipe", "export", "export_all", "recipe"]
