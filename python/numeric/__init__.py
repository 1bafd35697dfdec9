"""Numbers without a framework: jagged arrays and random numbers in NumPy, distances of distributions."""
