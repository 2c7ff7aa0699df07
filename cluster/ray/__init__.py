"""Gangs on a Ray cluster, its lease and queue, and controllers as Ray Jobs. Only this room imports Ray. Imports
``node``, ``gang``, ``base``, ``queue`` and ``hardware``."""
