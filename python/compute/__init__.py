"""C++ libraries, and numbers in NumPy: lists as offsets and values, random numbers without state, distances."""
