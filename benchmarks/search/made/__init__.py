"""Made problems: searches where memory binds, with planted machines whose truth is known."""
