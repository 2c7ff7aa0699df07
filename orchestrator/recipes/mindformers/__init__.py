"""The recipe of MindFormers; knows the base of recipes, and no other framework."""
