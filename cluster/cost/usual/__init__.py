"""What knobs usually do to a training program of which nothing is known: effects with their spread and source.

``knobs`` describes candidates by numbers, ``effects`` lists how far each usually goes, ``step`` and ``memory`` put
them together. Everything is relative: how fast a program is, its first trial tells.
"""
