"""The statistics of experiments on users, without Spark: who is in which arm, and whether arms differ.

`assign` gives users arms, `ratio` checks that as many came as were sent, `difference` compares arms with what was known
of users before, `sequential` has bounds that may be looked at every day.
"""
