"""The dry run's memory against what ranks really allocate."""
