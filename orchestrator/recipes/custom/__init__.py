"""Training programs of no framework that is known here: what a trial is to change stands in their command."""
