"""Candidates by the dot product of vectors: all items, or those that an index of them finds."""
