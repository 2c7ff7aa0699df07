"""What each command does, without the command line: submit, resume, stop, plan, estimate, probe, logs, the MLflow UI.

It may import promotion, controllers, status and what is below them; the command line calls it.
"""
