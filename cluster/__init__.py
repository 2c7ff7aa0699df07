"""Places gangs on nodes and runs them: the one package that may import ray (``ray_*``)."""
