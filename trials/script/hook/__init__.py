"""First on the PYTHONPATH of training programs, see :mod:`trials.script.command`; not imported by this project."""
