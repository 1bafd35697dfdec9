"""The Arrow engine over the data files of the lake: decoded once, kept, counted."""
