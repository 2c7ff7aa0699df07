"""A sweep as its ledger tells it: events, the state they fold to, and snapshots read from outside. Knows the values of
`cluster` and `trials` that events hold, and no other room but the ground floor."""
