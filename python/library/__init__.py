"""headrace as a library, for notebooks and programs of one's own: `import headrace as hr`.

frames      the kinds of frames that it takes, their columns and types
staging     a frame as data files, which the Arrow engine works on
workflow    hr.Workflow, hr.FittedWorkflow: fit, transform, write_dataset
dataset     hr.load_dataset: batches of a dataset for torch
predictor   hr.Predictor: what a saved model says of rows, in this process or in Spark's tasks
"""
