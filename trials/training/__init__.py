"""One rank's training loop: builds its part of the model, runs steps, measures them. Knows the rooms of all knobs."""
