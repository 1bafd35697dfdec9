"""C++ libraries, resources of a process, and arrays and random numbers in NumPy."""
