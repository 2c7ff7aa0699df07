"""What is known of programs written for Lightning; knows the base of recipes, and no other framework."""
