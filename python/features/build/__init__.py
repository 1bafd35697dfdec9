"""The stage `features`: the dataset of a day."""
