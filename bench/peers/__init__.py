"""Peers: programs of others, each run in a process of its own; each prints one line of JSON."""
