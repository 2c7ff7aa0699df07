"""Makes an unchanged training program report its steps, through interfaces of its framework.

Runs inside the program, in any Python from 3.8 and with any PyTorch from 1.13. It uses only the standard library,
relative imports, and modules that the program itself has imported. A failing hook is reported once and disabled.
"""
