"""What operators learn from the training rows: exact statistics of parts of the rows, and how they merge."""
