"""Figures of experiments on users, without Spark.

`comparison` reads what the users of each arm did from the outcomes' table and tests whether arms differ. `stage`
computes an experiment's figures and stops arms by rule. `headrace.score.assignment` gives users their arms.
"""
