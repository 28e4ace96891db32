"""The tensors that a checkpoint of a model must hold."""

from __future__ import annotations

import torch

from ..models import ModelConfig, family_of
from ..models.layout import DecoderLayout
from ..models.parts import SchemeOf
from .errors import CheckpointError, UnsupportedCheckpointError
from .format import StoredSchemeOf
from .reader import CheckpointReader
from .storage.base import Kept, StoredScheme
from .storage.dense import DENSE


def checked_layout(
    config: ModelConfig, scheme_of: SchemeOf, reader: CheckpointReader | None = None
) -> DecoderLayout:
    """Return the parts of a model whose linear modules are stored as `scheme_of` says.

    Args:
        config: of the model.
        scheme_of: of its modules.
        reader: of the checkpoint, which says whether its experts are stored together; tensors that
            the decoder has no use for are set aside. Without it they are stored one by one.

    Raises:
        UnsupportedModelError: naming two experts of a layer that are stored in different ways.
        UnsupportedCheckpointError: when an output projection tied to the embedding is quantised.
    """
    layout = family_of(config).layout(config)
    if layout.lm_head is None and scheme_of("lm_head") != DENSE:
        raise UnsupportedCheckpointError(
            "lm_head: the checkpoint quantises it, but tie_word_embeddings shares its weight "
            "with the embedding, which is not quantised; expected lm_head to be ignored"
        )
    if reader is None:
        return layout
    reader.set_aside(layout.unused)
    return layout.found_in(reader.has)


def with_plain_routers(scheme_of: StoredSchemeOf, layout: DecoderLayout) -> StoredSchemeOf:
    """Return how modules are stored, routers and gates of experts in 16 or 32 bits in any case.

    Quantisers leave them as they are. Not all configurations say so, since in transformers a
    router is no linear module.
    """
    plain = {module.name for part in layout.linears() if part.chooses for module in part.modules}
    if not plain:
        return scheme_of

    def of_module(*names: str) -> StoredScheme:
        return DENSE if plain.intersection(names) else scheme_of(*names)

    return of_module


def check_shares(layout: DecoderLayout, scheme_of: StoredSchemeOf) -> None:
    """Check that what a rank keeps of each module can be read, before any of it is.

    Raises:
        UnsupportedCheckpointError: naming the module, where it divides what has one scale.
    """
    for part in layout.linears():
        for scheme, run in part.runs(scheme_of):
            scheme.check_shares(run.modules)
    for experts in layout.experts():
        scheme = experts.scheme(scheme_of)
        for modules in experts.products():
            scheme.check_shares(modules)


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
    kept = layout.embedding.kept_rows
    if not torch.equal(Kept(spec, kept).read(reader), Kept(embedding, kept).read(reader)):
        raise CheckpointError(
            f"{reader.where(spec)}: differs from {embedding.name}, although config.json "
            "says that they are tied (tie_word_embeddings)"
        )
