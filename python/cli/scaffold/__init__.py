"""A first pipeline for data that nobody has described yet: `headrace init`.

sample: some rows of files or of a table; columns: what each column holds; roles: what each is for; pipeline_yaml: the
spec that follows, as commented YAML. No Spark: it answers in seconds.
"""
