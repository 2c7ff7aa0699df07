"""The implementation of each command, without the command line.

It may import promotion, controllers, status and the layers below them; the command line calls it.
"""
