"""Which items are ranked for a user: sources of candidates, what they may not be, and their union."""
