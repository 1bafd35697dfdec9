"""Network classes: the torch module that a spec's `model` names, and its construction.

A class of your own takes the dataset's features and its settings, and returns logits by name:

    class MyNet(torch.nn.Module):
        lookups: Sequence[EmbeddingLookup]                           # optional: tables, sequences (models.lookups)
        def __init__(self, features: InputFeatures, hidden: int = 64) -> None: ...
        def forward(self, inputs: Inputs) -> dict[str, Tensor]:      # {"logits": float32 [B]}
        def loss(self, outputs, inputs) -> Tensor:                   # optional: a sum over the rows, []

    model: {class: my_package.nets:MyNet, args: {hidden: 32}}

An installed package may give it a name, by an entry point of the group `headrace.models`.

Settings are checked by the constructor's signature. If the class has a pydantic model `Args`, they are checked by that,
and the constructor takes an instance of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from threading import Lock
from typing import Any, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from torch import nn

from headrace import config
from headrace.config.model import MODELS
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures
from headrace.plugins import Seam, faults_of

#: Built-in models by name.
_BUILT_IN: Mapping[str, str] = {
    "dlrm": "headrace.models.dlrm:DLRM",
    "wide_deep": "headrace.models.ranking:WideDeep",
    "deepfm": "headrace.models.ranking:DeepFM",
    "dcn_v2": "headrace.models.ranking:DCNv2",
    "final_mlp": "headrace.models.ranking:FinalMLP",
    "masknet": "headrace.models.ranking:MaskNet",
    "shared_bottom": "headrace.models.multitask:SharedBottom",
    "mmoe": "headrace.models.multitask:MMoE",
    "ple": "headrace.models.multitask:PLE",
    "esmm": "headrace.models.multitask:ESMM",
    "matrix_factorization": "headrace.models.collaborative:MatrixFactorization",
    "neumf": "headrace.models.collaborative:NeuMF",
    "mult_vae": "headrace.models.collaborative:MultVAE",
    "lightgcn": "headrace.models.lightgcn:LightGCN",
    "simplex": "headrace.models.collaborative:SimpleX",
    "sasrec": "headrace.models.next_item:SASRec",
    "hstu": "headrace.models.next_item:HSTU",
    "two_tower": "headrace.models.two_tower:TwoTower",
    "din": "headrace.models.din:DIN",
}

#: Classes that `model.class` names.
_NETWORKS = Seam(MODELS, "model", nn.Module, _BUILT_IN)

#: Serializes construction: ranks that are threads of a process would share one generator.
_GLOBAL_GENERATOR = Lock()


def make_network(model: config.Model, features: InputFeatures, seed: int) -> nn.Module:
    """Create the dense part of a model, on the CPU, with initial weights that depend only on the seed.

    Args:
        model: class and settings.
        features: the dataset's features.
        seed: seed of torch's global generator during construction; its previous state is restored.

    Raises:
        UserError: the class does not exist, or does not take these settings.
    """
    kind = _NETWORKS.find(model.kind, "model.class")
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model.kind == "dlrm":
            return kind(features, model)
        made_of, takes_one = _args_of(kind)
        try:
            args = made_of.model_validate(dict(model.args))
        except ValidationError as e:
            raise UserError(f"model.args of '{model.kind}': {faults_of(made_of, e)}") from None
        if takes_one:
            return kind(features, args)
        return kind(features, **{name: getattr(args, name) for name in made_of.model_fields})


def _args_of(kind: type[nn.Module]) -> tuple[type[BaseModel], bool]:
    """Return the pydantic model of a class's settings, and whether the constructor takes it as one argument."""
    declared = getattr(kind, "Args", None)
    if isinstance(declared, type) and issubclass(declared, BaseModel):
        return declared, True
    _, _, *parameters = inspect.signature(kind.__init__).parameters.values()
    hints = get_type_hints(kind.__init__)
    fields: dict[str, Any] = {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    strict = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return create_model(kind.__name__, __config__=strict, **fields), False
