"""Looks at ranks that make no progress, before they are killed: their stacks, and what torch's Flight Recorder has of
their collectives."""
