"""A rank whose work is a user's training program: starts it, listens to it, judges it, ends it.

Knows the words of a trial only, and no torch: the program brings its own.
"""
