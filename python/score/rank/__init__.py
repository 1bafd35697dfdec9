"""From candidates of a user to scores: features of pairs, the model, the best of each."""
