"""The recipe of Accelerate and the Trainer of transformers; knows the base of recipes, and no other framework."""
