"""Which of the sweeps that share a cluster may hold how many nodes. Imports ``hardware`` and ``processes``; knows no
backend."""
