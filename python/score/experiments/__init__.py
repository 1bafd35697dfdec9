"""Experiments on users, without Spark: assignment to arms, and differences between arms.

`assignment` gives users arms, lists a day's experiments and records stopped arms. `comparison` reads what users did
from the outcomes' table and tests whether arms differ. `stage` computes an experiment's figures and stops arms by rule.
"""
