"""The recipe of torchtitan; knows the base of recipes, and no other framework."""
