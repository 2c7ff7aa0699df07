"""Gangs on a Ray cluster, its lease and queue, and controllers as Ray Jobs: the only room that imports Ray. Imports
``node``, ``gang``, ``base``, ``queue``, ``request`` and ``hardware``."""
