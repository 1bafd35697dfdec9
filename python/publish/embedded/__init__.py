"""The PostgreSQL that comes as a wheel: its processes, its roles, and who uses it."""
