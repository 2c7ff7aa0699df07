"""Other frameworks: writes a configuration in their own formats, applies one to a user's command, and reads both back.

Depends only on the specification of trials and the knobs, not on sweeps or measurements.
"""
