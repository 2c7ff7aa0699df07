"""AdamW on what a rank holds of the model: on its device, or in the memory of its host."""
