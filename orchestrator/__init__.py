"""Decides: reads the sweep, proposes candidates, journals, records, reports, promotes."""
