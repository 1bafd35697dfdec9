"""Collaborative filtering over users and items: matrix factorisation, SimpleX, NeuMF, Mult-VAE, each from its paper."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, normalize, pad

from headrace.config.model_args import MatrixFactorizationArgs, MultVAEArgs, NeuMFArgs, SimpleXArgs
from headrace.embeddings.jagged import JaggedTensor
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs, check_feature
from headrace.models.layers import hidden_layers
from headrace.models.lookups import EmbeddingLookup
from headrace.models.losses import binary_cross_entropy, bpr, cosine_contrastive, sampled_softmax, weighted_sum


def dots(queries: Tensor, items: Tensor) -> Tensor:
    """Return each row's dot product: float32 [B, D], [B, D] -> [B]."""
    return (queries * items).sum(dim=1)


def dots_with_negatives(queries: Tensor, negatives: Tensor) -> Tensor:
    """Return the dot products of queries [B, D] and negatives [B, n, D], or [n, D] shared by all rows: float32 [B,
    n].
    """
    if negatives.ndim == 2:
        return queries @ negatives.T
    return torch.bmm(negatives, queries.unsqueeze(2)).squeeze(2)


def unit(x: Tensor) -> Tensor:
    """Scale vectors to length 1; zeros stay."""
    return normalize(x, dim=-1)


def weights_of_positives(inputs: Inputs) -> Tensor:
    """Return the rows' weights in a loss of positives: 0 for a row of label 0. float32 [B]."""
    return inputs.labels if inputs.weights is None else inputs.labels * inputs.weights


def loss_of(kind: Literal["bce", "bpr", "softmax"], outputs: Mapping[str, Tensor], inputs: Inputs, item: str) -> Tensor:
    """Return the loss, summed over the rows: [].

    Args:
        kind: bce compares each row with its label; the others compare positive rows with their negatives.
        outputs: `logits` [B]; `negatives` [B, n], the scores of the batch's negatives.
        item: the feature of the negatives; a softmax leaves out negatives that are the row's own item.
    """
    logits = outputs["logits"]
    if kind == "bce":
        return binary_cross_entropy(logits, inputs.labels, inputs.weights)
    weights = weights_of_positives(inputs)
    if kind == "bpr":
        return bpr(logits, outputs["negatives"], weights)
    item_ids = inputs.ids(item)
    assert isinstance(item_ids, Tensor)
    return sampled_softmax(logits, outputs["negatives"], weights, hits=inputs.negatives == item_ids.unsqueeze(1))


def cardinality_of(features: InputFeatures, name: str) -> int:
    """Return the number of codes of a feature whose complete table a model reads.

    Raises:
        UserError: the dataset has no such feature with one code a row.
    """
    cardinality = features.cardinality.get(name)
    if cardinality is None:
        raise UserError(
            f"the model looks at every value of feature '{name}': the dataset has no such feature with a vocabulary "
            f"(categorify)"
        )
    check_feature(features, "model.args", name, is_list=False)
    return cardinality


class MatrixFactorization(nn.Module):
    """A vector for each user and each item; the logit is their dot product plus a bias of the item.

    Koren, Bell, Volinsky, "Matrix Factorization Techniques for Recommender Systems" (2009).

    With `similarity: cosine` the logit is their cosine over the temperature, without a bias. With a sampled softmax
    that is the model of Wu et al., "On the Effectiveness of Sampled Softmax Loss for Item Recommendation" (2024).

    The loss `bce` compares each row with its label. `bpr` (Rendle et al., "BPR: Bayesian Personalized Ranking from
    Implicit Feedback", 2009) and `softmax` compare positive rows with the batch's negatives; rows of label 0 add
    nothing.
    """

    Args = MatrixFactorizationArgs

    def __init__(self, features: InputFeatures, args: MatrixFactorizationArgs) -> None:
        super().__init__()
        check_feature(features, "model.args.item", args.item, is_list=False)
        self.args, self.item, self._cosine = args, args.item, args.similarity == "cosine"
        self._bias = int(args.item_bias and not self._cosine)
        width = features.embedding_dim
        self.lookups = [
            EmbeddingLookup("user", args.user, width),
            EmbeddingLookup("item", args.item, width + self._bias),
        ]
        if args.loss != "bce":
            self.lookups.append(EmbeddingLookup("negatives", args.item, width + self._bias, ids="negatives"))

    def queries(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' users, float32 [B, D]; the last column is 1 where items have a bias."""
        users = self._scaled(inputs.embedding("user")) / self.args.temperature
        return pad(users, (0, 1), value=1.0) if self._bias else users

    def items(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' items, float32 [B, D]."""
        return self._scaled(inputs.embedding("item"))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]; in training `negatives` [B, n] besides, where the loss uses them."""
        queries = self.queries(inputs)
        outputs = {"logits": dots(queries, self.items(inputs))}
        if self.training and self.args.loss != "bce":
            outputs["negatives"] = dots_with_negatives(queries, self._scaled(inputs.embedding("negatives")))
        return outputs

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the sum over the rows, []."""
        return loss_of(self.args.loss, outputs, inputs, self.item)

    def _scaled(self, x: Tensor) -> Tensor:
        return unit(x) if self._cosine else x


class SimpleX(nn.Module):
    """The cosine of an item and a user, whose vector combines one of the user's own with the mean of a history.

    Mao et al., "SimpleX: A Simple and Strong Baseline for Collaborative Filtering" (CIKM 2021).

    user = user_share * u + (1 - user_share) * V mean(items of the history). The history's items share the item's table
    if both features have one vocabulary. A user without a history has the vector u, and with `history: null` all users
    have: that is matrix factorisation with the cosine contrastive loss.
    """

    Args = SimpleXArgs

    def __init__(self, features: InputFeatures, args: SimpleXArgs) -> None:
        super().__init__()
        width = features.embedding_dim
        self.args, self.item = args, args.item
        self.lookups = [
            EmbeddingLookup("user", args.user, width),
            EmbeddingLookup("item", args.item, width),
            EmbeddingLookup("negatives", args.item, width, ids="negatives"),
        ]
        if args.history is not None:
            self.lookups.append(EmbeddingLookup("history", args.history, width, pooling="mean"))
            #: The matrix V of the paper.
            self.of_history = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(args.dropout)

    def queries(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' users, of length 1: float32 [B, D]."""
        users = inputs.embedding("user")
        if self.args.history is not None:
            share = self.args.user_share
            users = share * users + (1 - share) * self.of_history(inputs.embedding("history"))
        return unit(self.dropout(users))

    def items(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' items, of length 1: float32 [B, D]."""
        return unit(inputs.embedding("item"))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B], cosines; `negatives` [B, n] besides, in training."""
        queries = self.queries(inputs)
        outputs = {"logits": dots(queries, self.items(inputs))}
        if self.training:
            outputs["negatives"] = dots_with_negatives(queries, unit(inputs.embedding("negatives")))
        return outputs

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the sum over the rows, []; a row of label 0 adds nothing."""
        return cosine_contrastive(
            outputs["logits"],
            outputs["negatives"],
            weights_of_positives(inputs),
            margin=self.args.margin,
            negative_weight=self.args.negative_weight,
        )


class NeuMF(nn.Module):
    """A generalised matrix factorisation (GMF) and an MLP over users and items, fused by one linear layer.

    He et al., "Neural Collaborative Filtering" (WWW 2017).

    GMF multiplies the vectors of a user and an item element by element; the MLP reads them side by side. Each part has
    its own tables, `gmf` and `mlp`. With `part: gmf` or `part: mlp` the model is only that part. The fused model can
    start from two such models (`start_from`; section 3.4.1 of the paper).
    """

    Args = NeuMFArgs

    def __init__(self, features: InputFeatures, args: NeuMFArgs) -> None:
        super().__init__()
        self.args = args
        self.lookups: list[EmbeddingLookup] = []
        width = 0
        if args.part != "mlp":
            self._add_lookups("gmf", features.embedding_dim)
            width += features.embedding_dim
        if args.part != "gmf":
            dim = args.mlp_dim or features.embedding_dim
            self._add_lookups("mlp", dim)
            self.mlp = hidden_layers(2 * dim, args.mlp, args.dropout)
            width += args.mlp[-1] if args.mlp else 2 * dim
        self.dropout = nn.Dropout(args.embedding_dropout)
        self.head = nn.Linear(width, 1)

    def _add_lookups(self, part: str, dim: int) -> None:
        for side, feature in (("user", self.args.user), ("item", self.args.item)):
            self.lookups.append(EmbeddingLookup(f"{part}_{side}", feature, dim, table=part))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]."""
        parts = []
        if self.args.part != "mlp":
            parts.append(self.dropout(inputs.embedding("gmf_user") * inputs.embedding("gmf_item")))
        if self.args.part != "gmf":
            sides = torch.cat([inputs.embedding("mlp_user"), inputs.embedding("mlp_item")], dim=1)
            parts.append(self.mlp(self.dropout(sides)))
        return {"logits": self.head(torch.cat(parts, dim=1)).squeeze(1)}

    def start_from(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the dense parts of two trained models, `gmf` and `mlp`, from their state dicts.

        The head is alpha times the head of GMF, and 1 - alpha times the head of the MLP, side by side.

        Raises:
            KeyError, RuntimeError: a state of another shape.
        """
        gmf, mlp = states["gmf"], states["mlp"]
        inner = {k.removeprefix("mlp."): v for k, v in mlp.items() if k.startswith("mlp.")}
        self.mlp.load_state_dict(inner)
        alpha = self.args.alpha
        with torch.no_grad():
            self.head.weight.copy_(torch.cat([alpha * gmf["head.weight"], (1 - alpha) * mlp["head.weight"]], dim=1))
            self.head.bias.copy_(alpha * gmf["head.bias"] + (1 - alpha) * mlp["head.bias"])


class MultVAE(nn.Module):
    """A variational autoencoder of a row's list of items, which is a draw from a multinomial over all items.

    Liang et al., "Variational Autoencoders for Collaborative Filtering" (WWW 2018).

    The encoder's first layer and the decoder's last layer have the width of the vocabulary. Both are embedding tables,
    which shard: `encoder` (summed over the list) and `decoder` (a row and a bias for each item). A row is a user with a
    list. The row's own item is only scored: its logit is the multinomial's, without the normaliser.

    The loss is the list's negative log-likelihood, plus the KL divergence of the latent normal times a factor that
    rises to `kl_weight` over `anneal_steps` steps. Labels have no effect. With `variational: false` the latent vector
    is its mean and there is no divergence: Mult-DAE of the same paper.
    """

    Args = MultVAEArgs

    def __init__(self, features: InputFeatures, args: MultVAEArgs) -> None:
        super().__init__()
        cardinality_of(features, args.item)
        if features.vocabulary.get(args.history) != features.vocabulary[args.item]:
            raise UserError(
                f"model.args: '{args.history}' is a list of '{args.item}' only where both have one vocabulary "
                f"(categorify: {{vocabulary: NAME}})"
            )
        widths, latent = args.hidden, features.embedding_dim
        self.args, self.item = args, args.item
        self._first_code = features.first_code[args.item]
        self.lookups = [
            EmbeddingLookup("history", args.history, widths[0], pooling="none", table="encoder"),
            EmbeddingLookup("item", args.item, widths[0] + 1, table="decoder"),
            EmbeddingLookup("all_items", args.item, widths[0] + 1, table="decoder", ids="all"),
        ]
        self.first_bias = nn.Parameter(torch.zeros(widths[0]))
        self.encoder = _tanh_layers(widths)
        #: Mean and log variance of the latent vector.
        self.latent = nn.Linear(widths[-1], 2 * latent if args.variational else latent)
        self.decoder = _tanh_layers((latent, *reversed(widths)))
        #: Weight of the divergence in this step, [].
        self.kl_weight: Tensor
        self.register_buffer("kl_weight", torch.tensor(float(args.kl_weight)), persistent=False)

    def begin_step(self, step: int) -> None:
        """Anneal the divergence's weight; `step` counts from 1."""
        rises = self.args.anneal_steps
        self.kl_weight.fill_(self.args.kl_weight * (min(1.0, step / rises) if rises else 1.0))

    def _encoded(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the rows' latent vectors, [B, D], and their divergence from a standard normal, [B]."""
        history = inputs.sequence("history")
        # The length of a vector of zeros and ones is the square root of the number of ones.
        weights = dropout(torch.ones_like(history.values[:, :1]), self.args.dropout, self.training)
        total = JaggedTensor(history.values * weights, history.offsets).pooled("sum")
        total = total / history.lengths.clamp(min=1).sqrt().unsqueeze(1)
        latent = self.latent(self.encoder(torch.tanh(total + self.first_bias)))
        if not self.args.variational:
            return latent, latent.new_zeros(len(latent))
        mean, log_variance = latent.chunk(2, dim=1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1)
        if self.training:
            mean = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        return mean, divergence

    def _query(self, latent: Tensor) -> Tensor:
        return pad(self.decoder(latent), (0, 1), value=1.0)

    def queries(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' lists, float32 [B, D]."""
        return self._query(self._encoded(inputs)[0])

    def items(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' items with their biases, float32 [B, D]."""
        return inputs.embedding("item")

    def all_items(self, inputs: Inputs) -> Tensor:
        """Return the vectors of all codes, [cardinality, D]."""
        return inputs.embedding("all_items")

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]; in training also `log_likelihood` of the rows' lists and `divergence`, [B]
        each.
        """
        latent, divergence = self._encoded(inputs)
        queries = self._query(latent)
        outputs = {"logits": dots(queries, self.items(inputs))}
        if self.training:
            outputs |= {"log_likelihood": self._log_likelihood(queries, inputs), "divergence": divergence}
        return outputs

    def _log_likelihood(self, queries: Tensor, inputs: Inputs) -> Tensor:
        ids = inputs.ids(self.args.history)
        assert isinstance(ids, JaggedTensor)
        first = self._first_code  # codes of no item or of many items are never drawn
        logits = queries @ self.all_items(inputs)[first:].T
        rows = torch.repeat_interleave(torch.arange(ids.samples, device=logits.device), ids.lengths)
        known = ids.values >= first
        rows, items = rows[known], ids.values[known] - first
        each = logits[rows, items] - logits.logsumexp(dim=1)[rows]
        return each.new_zeros(ids.samples).index_add_(0, rows, each)

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the sum over the rows, []."""
        return weighted_sum(self.kl_weight * outputs["divergence"] - outputs["log_likelihood"], inputs.weights)


def _tanh_layers(widths: tuple[int, ...]) -> nn.Sequential:
    """Create linear layers from widths[0] to widths[-1], each followed by a tanh."""
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers)
