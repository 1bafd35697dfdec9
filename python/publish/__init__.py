"""Write, audit, publish: a day's scores to a warehouse and to a Delta table."""
