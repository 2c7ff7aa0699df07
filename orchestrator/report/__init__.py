"""The result of a sweep as one value, its words, and what renders it: Markdown, plots, a page.

Imports diagnosis and what lies below it: planning, proof, config, space and sweep.
"""
