"""Imported last by a fork server: collections in its children skip what is there by now, mostly torch's modules."""

import gc

gc.collect()
gc.freeze()
