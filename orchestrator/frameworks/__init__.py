"""Other frameworks: a configuration written as their own files or laid over a user's command, and read back.

Depends on the specification of trials and the knobs: nothing of sweeps or of what was measured.
"""
