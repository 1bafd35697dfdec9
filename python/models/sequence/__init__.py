"""Models of what a user did before, in its order: next-item models (SASRec, HSTU) and target attention (DIN).

Histories are ragged: each row has its own number of ids, and everything that works on one place at a time (embeddings,
norms, linear layers, losses) sees the places of all rows behind each other, [N, D], without padding. Attention alone
needs a row's places beside each other: headrace.models.sequence.ragged.
"""
