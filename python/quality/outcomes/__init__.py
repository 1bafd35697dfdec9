"""Outcomes of served lists: what users did with the lists they were shown, and the stage `outcomes`.

`served` finds the lists of earlier days, `measure` joins them with the events that followed and computes metrics, and
`stage` checks the metrics against limits and commits.
"""
