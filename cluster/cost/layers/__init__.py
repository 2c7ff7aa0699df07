"""What the layers of decoders consist of: operators, and experts where they have some."""
