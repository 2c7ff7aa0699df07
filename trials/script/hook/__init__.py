"""Goes first on the PYTHONPATH of training programs, see :mod:`trials.script.command`; nothing of ours imports it."""
