"""Makes an unchanged training program report its steps, through the interfaces that its framework offers for that.

Runs inside the program, in any Python from 3.8 and with any PyTorch from 1.13: standard library, relative imports, and
modules that the program itself has imported. Whatever fails in here is noted once and steps aside.
"""
