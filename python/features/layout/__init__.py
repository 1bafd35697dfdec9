"""The place of a row: its split, its part of the split, its file."""
