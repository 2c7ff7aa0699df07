"""Programs on the Trainer of transformers; knows what such programs have in common, and no other framework."""
