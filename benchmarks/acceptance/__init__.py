"""The published cases: what the service finds for them, beside what was published."""
