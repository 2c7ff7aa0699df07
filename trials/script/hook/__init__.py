"""Goes first on the PYTHONPATH of training programs, see :mod:`trials.script.hook_path`; nothing of ours imports it."""
