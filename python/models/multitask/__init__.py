"""Models of several labels (`train.tasks`) over the embeddings and the numbers of a row."""
