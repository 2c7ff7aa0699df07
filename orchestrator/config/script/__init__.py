"""A training program of the user's own in a sweep file: how it is written, what is checked, what comes of it."""
