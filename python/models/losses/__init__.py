"""Losses as plain functions of tensors, each with its paper.

Each is a sum over the rows that are here, never a mean: a step's rows lie on several ranks and in several
micro-batches, so the divisor is the trainer's (the rows of the global batch). Row weights multiply what a row adds.

    pointwise   binary cross-entropy, focal, squared error: a prediction and a label a row
    pairwise    BPR: a positive against negatives; RankNet and LambdaRank: all pairs of a list
    softmax     sampled softmax and in-batch softmax, with logQ correction
    shared_negatives   sampled softmax of negatives that all rows share, without the matrix of their logits
    contrastive the cosine contrastive loss
"""
