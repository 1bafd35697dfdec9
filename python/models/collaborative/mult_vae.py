"""Mult-VAE: Liang et al., "Variational Autoencoders for Collaborative Filtering" (WWW 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad

from headrace.config.model_args import MultVAEArgs
from headrace.embeddings.input.jagged import JaggedTensor
from headrace.errors import UserError
from headrace.models.collaborative.scores import cardinality_of, dots
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup
from headrace.models.losses.reduction import weighted_sum


class MultVAE(nn.Module):
    """A variational autoencoder of a row's list of items, which is a draw from a multinomial over all items.

    The first layer of the encoder and the last of the decoder are as wide as there are items: both are embedding
    tables, `encoder` (summed over the list) and `decoder` (a row and a bias an item), which shard. A row is a user with
    a list; the row's own item is only scored: its logit is the multinomial's, without the normaliser.

    The loss is the list's negative log-likelihood plus the KL divergence of the latent normal times a factor that rises
    with the steps, to `kl_weight` after `anneal_steps`. Labels are not looked at. With `variational: false` the latent
    vector is its mean and there is no divergence: Mult-DAE of the same paper.
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
        #: Mean and log of the variance of the latent vector.
        self.latent = nn.Linear(widths[-1], 2 * latent if args.variational else latent)
        self.decoder = _tanh_layers((latent, *reversed(widths)))
        #: What multiplies the divergence in this step, [].
        self.kl_weight: Tensor
        self.register_buffer("kl_weight", torch.tensor(float(args.kl_weight)), persistent=False)

    def begin_step(self, step: int) -> None:
        """Anneal; `step` counts from 1."""
        rises = self.args.anneal_steps
        self.kl_weight.fill_(self.args.kl_weight * (min(1.0, step / rises) if rises else 1.0))

    def _encoded(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The latent vectors of the rows, [B, D], and their divergence from a standard normal, [B]."""
        history = inputs.sequence("history")
        # Of a row of zeros and ones the length is the square root of the number of ones.
        weights = dropout(torch.ones_like(history.values[:, :1]), self.args.dropout, self.training)
        total = JaggedTensor(history.values * weights, history.offsets).pooled("sum")
        total = total / history.lengths.clamp(min=1).sqrt().unsqueeze(1)
        found = self.latent(self.encoder(torch.tanh(total + self.first_bias)))
        if not self.args.variational:
            return found, found.new_zeros(len(found))
        mean, log_variance = found.chunk(2, dim=1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1)
        if self.training:
            mean = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        return mean, divergence

    def _query(self, latent: Tensor) -> Tensor:
        return pad(self.decoder(latent), (0, 1), value=1.0)

    def queries(self, inputs: Inputs) -> Tensor:
        """Vectors of the rows' lists, float32 [B, D]."""
        return self._query(self._encoded(inputs)[0])

    def items(self, inputs: Inputs) -> Tensor:
        """Vectors of the rows' items with their biases, float32 [B, D]."""
        return inputs.embedding("item")

    def all_items(self, inputs: Inputs) -> Tensor:
        """Of every code, [cardinality, D]."""
        return inputs.embedding("all_items")

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """`logits` float32 [B]; in training also `log_likelihood` of the rows' lists and `divergence`, [B] each."""
        latent, divergence = self._encoded(inputs)
        queries = self._query(latent)
        outputs = {"logits": dots(queries, self.items(inputs))}
        if self.training:
            outputs |= {"log_likelihood": self._log_likelihood(queries, inputs), "divergence": divergence}
        return outputs

    def _log_likelihood(self, queries: Tensor, inputs: Inputs) -> Tensor:
        ids = inputs.ids(self.args.history)
        assert isinstance(ids, JaggedTensor)
        first = self._first_code  # what stands for no item or for many is never drawn
        logits = queries @ self.all_items(inputs)[first:].T
        rows = torch.repeat_interleave(torch.arange(ids.samples, device=logits.device), ids.lengths)
        known = ids.values >= first
        rows, items = rows[known], ids.values[known] - first
        each = logits[rows, items] - logits.logsumexp(dim=1)[rows]
        return each.new_zeros(ids.samples).index_add_(0, rows, each)

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """The sum over the rows, []."""
        return weighted_sum(self.kl_weight * outputs["divergence"] - outputs["log_likelihood"], inputs.weights)


def _tanh_layers(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers from widths[0] to widths[-1], a tanh behind each."""
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers)
