"""The command line. Each command parses its options, calls one function of a lower layer, and prints the result.

It may import every package; slow imports belong inside the commands.
"""
