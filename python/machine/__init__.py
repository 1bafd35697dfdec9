"""The machine below a process: its C++ libraries, what is used of it, and whose account it is."""
