"""What programs on the Trainer of transformers have in common, and the model files of Hugging Face."""
