"""What each command does, without the command line: submit, resume, stop, plan, estimate, probe, logs, the MLflow UI.

It knows controllers, status and what is below them, but neither click nor how results are shown.
"""
