"""The recipe of PaddleNLP; knows the base of recipes, and no other framework."""
