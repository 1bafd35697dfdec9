"""Exact statistics of parts of the training rows, which operators learn from, and how they merge."""
