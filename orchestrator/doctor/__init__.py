"""Doctor: looks at everything a sweep will need, one check a line, each with what to do about it.

Nothing is started or changed, nothing is waited for longer than its deadline, and neither torch nor Ray has to be
there.
"""
