import sys
from ast import literal_eval

for word in sys.argv[1:]:
    key, value = word[2:].split("=")
    if key not in globals():
        raise ValueError(f"unknown key {key}")
    globals()[key] = literal_eval(value)
