"""Tells people and programs outside what happened to a sweep. Knows the ledger (`sweep`), the section of the sweep file
(`config`) and the summary of a result (`report`)."""
