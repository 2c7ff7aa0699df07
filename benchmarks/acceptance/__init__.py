"""The published cases: what the service finds for them, and the published figures."""
