"""The command line: what people type. It parses options, calls one function of a room below, and prints the result.

It may import every room; whatever is slow to import, only inside a command.
"""
