"""The result of a sweep as one value, its words, and what renders it: Markdown, plots, a page.

Imports diagnosis, proof, config, space and sweep.
"""
