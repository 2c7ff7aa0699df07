"""The recipe of DeepSpeed; knows the base of recipes, and no other framework."""
