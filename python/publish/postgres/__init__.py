"""PostgreSQL as a warehouse: the connection, staging, audit and swap."""
