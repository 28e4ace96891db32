"""Models of several towers, such as vision and text: the text tower is a decoder of a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config_fields import Fields

_DTYPE = ("dtype", "torch_dtype")
_IDS = ("bos_token_id", "eos_token_id")
_TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Tower:
    """A model whose text tower is served, by itself.

    Args:
        model_type: of the model's config.json.
        architectures: that it may name.
        family: model_type of a text tower that does not name its own.
        any_family: whether a text tower may name another family.
        flat: whether the text tower's fields may be beside those of the model, without a
            `text_config`.
    """

    model_type: str
    architectures: tuple[str, ...]
    family: str
    any_family: bool = False
    flat: bool = False

    def text_fields(self, outer: Fields) -> Fields:
        """Return the fields of the text tower, with those that the model has for it.

        Raises:
            UnsupportedModelError: naming the field, when there is no text tower, or one of a
                family that the model does not have.
        """
        flat = self.flat and outer.get("text_config") is None and outer.get("hidden_size")
        text = outer if flat else outer.child("text_config")
        if not flat and not self.any_family:
            text.choice("model_type", self.family, default=self.family)
        named = None if flat else text.get("model_type")
        return Fields(
            text.where,
            {**text.fields, **_shared(outer, text), "model_type": named or self.family},
        )


def _shared(outer: Fields, text: Fields) -> Mapping[str, Any]:
    """Return the text tower's fields for which the model's count, too."""
    shared: dict[str, Any] = {}
    if any(outer.get(name) is not None for name in _DTYPE):
        shared = {name: outer.get(name) for name in _DTYPE}
    for name in _IDS:
        if text.get(name) is None and outer.get(name) is not None:
            shared[name] = outer.get(name)
    if outer.get(_TIED) is not None or text.get(_TIED) is not None:
        # Versions of transformers differ in whose field counts. Where this is wrong, the output
        # projection is missing or differs from the embedding, which is an error.
        shared[_TIED] = outer.boolean(_TIED, False) or text.boolean(_TIED, False)
    return shared
