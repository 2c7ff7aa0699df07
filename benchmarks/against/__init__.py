"""One table: this tuner next to what one would use instead, in one run of at most 25 minutes on two cores."""
