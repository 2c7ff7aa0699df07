"""LLaMA-Factory; knows what programs on the Trainer of transformers have in common, and no other framework."""
