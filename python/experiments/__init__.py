"""Experiments on users, without Spark: who is in which arm, and whether arms differ.

`assign` gives users arms, `live` knows which experiments a day has; `ratio` checks that as many came as were sent,
`difference` compares arms with what was known of users before, `sequential` has bounds that may be looked at every day.
`totals` reads what users did from the outcomes' table, `figures` makes all of these of it, `stops` keeps who stopped
which arm, and `stage` does so by rule.
"""
