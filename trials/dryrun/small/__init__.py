"""What small trials tell of a large one: fewer layers, micro-batches and pipeline ranks. Standard library only."""
