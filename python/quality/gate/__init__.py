"""Gate between a day's model and production: evaluation, rules, and promotion to champion.

`predictions` has models predict the same raw rows, `evaluate` measures them in Spark's tasks, `day_evaluation` does so
for a day's split, and `evaluation_stages` are the stages that compare models. `rules` judges the figures; `stage` has
the verdict and the promotion.
"""
