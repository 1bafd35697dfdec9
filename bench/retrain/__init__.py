"""`make month`: generated clicks that move, trained anew every day, beside a model that was trained once.

    make month                      # 30 days in build/month, then build/month/retrain.json and retrain.png
    make year                       # 365 short ones in build/year
    make month-replay               # the month's days again with rows of older days in them: what is forgotten
    python -m bench.retrain --show  # the table and the picture of what is there

Runs what is missing: each day's stages leave what is done alone, and days that were measured are not measured again.
"""
