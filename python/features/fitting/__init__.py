"""What a fit learns: statistics of parts of the rows that merge exactly, and the passes that gather them."""
