"""The recipe of Megatron-LM; knows the base of recipes, and no other framework."""
