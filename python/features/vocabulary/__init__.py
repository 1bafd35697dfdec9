"""Vocabularies: codes for values, given once and for ever, and tables of values by key."""
