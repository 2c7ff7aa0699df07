"""Tables of published measurements as inputs of the cost model. Imports the rest of ``cost`` but ``balance``."""
