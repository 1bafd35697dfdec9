"""Where a row goes: its split, its part of the split, its file."""
