"""Write, audit, publish: a day's scores to a PostgreSQL warehouse and to a Delta table."""
