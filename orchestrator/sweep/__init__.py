"""A sweep in its ledger: events, the state they fold to, and snapshots for readers. Uses the values of ``cluster`` and
``trials`` in events, and otherwise only the lowest layer."""
