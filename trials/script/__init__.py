"""A rank that runs a training program: starts it, reads its reports, judges it and ends it.

Depends only on the interface of a trial, and does not need torch: the program brings its own.
"""
