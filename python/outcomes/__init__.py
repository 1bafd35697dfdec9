"""What users did with the lists that they were served: the stage `outcomes`.

`served` says which lists there were, `join` puts the events that followed beside their rows, `measure` makes metrics of
them, `delays` knows how much is still to come, `alerts` holds metrics against limits, `stage` commits.
"""
