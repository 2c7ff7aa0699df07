"""One rank's training loop: builds its part of the model, runs steps and measures them. Depends on all knobs."""
