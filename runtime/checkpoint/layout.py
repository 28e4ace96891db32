"""The tensors that a checkpoint of a model must hold."""

from __future__ import annotations

import torch

from ..models import ModelConfig, family_of
from ..models.parts import DecoderLayout, SchemeOf
from .errors import CheckpointError, UnsupportedCheckpointError
from .reader import CheckpointReader
from .storage.dense import DENSE


def checked_layout(config: ModelConfig, scheme_of: SchemeOf) -> DecoderLayout:
    """Return the parts of a model whose linear modules are stored as `scheme_of` says.

    Raises:
        UnsupportedCheckpointError: when an output projection tied to the embedding is quantised.
    """
    layout = family_of(config).layout(config)
    if layout.lm_head is None and scheme_of("lm_head") != DENSE:
        raise UnsupportedCheckpointError(
            "lm_head: the checkpoint quantises it, but tie_word_embeddings shares its weight "
            "with the embedding, which is not quantised; expected lm_head to be ignored"
        )
    return layout


def check_tied(reader: CheckpointReader, layout: DecoderLayout) -> None:
    """Check that a stored copy of a tied embedding, if there is one, equals the embedding.

    Raises:
        CheckpointError: naming the tensor, when it differs.
    """
    if layout.tied_output is None or not reader.has(layout.tied_output.spec):
        return
    spec, embedding = layout.tied_output.spec, layout.embedding.spec
    if reader.where(spec) == reader.where(embedding):
        return  # it is the only copy
    if not torch.equal(reader.read(spec), reader.read(embedding)):
        raise CheckpointError(
            f"{reader.where(spec)}: differs from {embedding.name}, although config.json "
            "says that they are tied (tie_word_embeddings)"
        )
