"""What the vendors' tools say of the devices of this host, one module per kind. Imports no torch, starts no device."""
