"""Training and measurement of one candidate in the ranks of a gang. Independent of clusters, sweeps, ray and mlflow.

Most modules import torch. Those that other packages import need only the standard library: ``spec``, ``outcome``,
``failure``, ``files``, ``secrets``, ``sizes``, ``reports``, ``health``, ``legality``, parts of ``dryrun``.
"""
