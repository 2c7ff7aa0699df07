"""Trains and measures one candidate in the ranks of a gang. Knows no cluster, sweep or service such as ray or mlflow.

Most of it imports torch. What the other packages import needs the standard library only: ``spec``, ``outcome``,
``codec``, ``failure``, ``files``, ``secrets``, ``stages``, ``flops``, ``reports``, ``legality``, parts of ``dryrun``.
"""
