"""Hardware as planning needs it: what a sweep file asks of its cluster, and what probes have found out about it.

It reads sweep files and the home, and describes clusters without starting one.
"""
