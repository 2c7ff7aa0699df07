"""The recipe of our own runner under plain torchrun; knows the base of recipes, and no other framework."""
