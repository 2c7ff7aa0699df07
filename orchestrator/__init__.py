"""The orchestrator: reads sweep files, proposes candidates, records events, reports and promotes."""
