"""A cache of transformers in static memory, of sequences that each have a length of their own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ... import ops
from ...ops.common import checks
from ...ops.common.sizes import round_up

NAME = "ostinato"  # of the attention implementation
_PLACES = 16  # tokens; our kernels copy pages of a multiple of it at once


class RaggedStaticCache:
    """Keys and values in memory that stays in place, where each row has a length of its own.

    A `StaticCache` of transformers counts the tokens of all rows together, so that sequences of
    different lengths need padding in it. Here lengths live on the device and belong to the caller:
    `rows` says what they are in a call of the model.

    Args:
        model: of transformers, with `attn_implementation="ostinato"`. Its layers must have keys
            and values of one shape.
        max_batch: rows.
        max_length: tokens that a row holds, rounded up to a multiple of 16.

    Attributes:
        storage: [layers, 2, max_batch, heads_kv, places, dim] of the model's dtype: keys, values.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    def __init__(self, model: Any, max_batch: int, max_length: int) -> None:
        checks.integer("max_batch", max_batch, least=1)
        checks.integer("max_length", max_length, least=1)
        self._config = config = model.config.get_text_config()
        self._check_attention()
        if getattr(model, "_is_stateful", False):
            raise ValueError(
                f"model: got {type(model).__name__}, expected one that keeps nothing but keys and "
                "values from call to call"
            )
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        heads_kv = getattr(config, "num_key_value_heads", None) or heads
        places = round_up(max_length, _PLACES)
        self.storage = torch.zeros(
            (config.num_hidden_layers, 2, max_batch, heads_kv, places, dim),
            dtype=model.dtype,
            device=model.device,
        )
        self._first_slots = torch.arange(max_batch, device=model.device).unsqueeze(1) * places

    @property
    def places(self) -> int:
        """Tokens that a row holds."""
        return self.storage.size(4)

    def tensors(self) -> list[torch.Tensor]:
        """Return all of its memory, for `GraphRunner(memory=...)`."""
        return [self.storage, self._first_slots]

    def rows(self, seq_lens: torch.Tensor, tokens: int = 1) -> Rows:
        """Return the first rows as `past_key_values` of one call of the model.

        The call's T tokens of a row are its last ones: token i stands at position
        seq_lens - T + i, also for attention. A row of fewer tokens than T begins with padding, a
        row of none is all padding: it has no position, attends to nothing and is not written. Nor
        is what would stand after the last place.

        Args:
            seq_lens: [batch] int32, tokens of each row, those of the call included.
            tokens: T, of each row in the call.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        device = self.storage.device
        checks.tensor("seq_lens", seq_lens, (torch.int32,), ("batch",), device)
        checks.integer("tokens", tokens, least=1)
        batch, most = seq_lens.size(0), self.storage.size(2)
        if batch > most:
            raise ValueError(f"seq_lens: got {batch} rows, expected at most {most}")
        self._check_attention()
        before = torch.arange(-tokens, 0, dtype=torch.int32, device=device)
        positions = seq_lens.unsqueeze(1) + before
        inside = positions.clamp(0, self.places - 1)
        slots = inside + self._first_slots[:batch]
        slots.masked_fill_(inside != positions, -1)
        layers = [RowsLayer(layer[:, :batch], slots) for layer in self.storage]
        return Rows(layers, inside, seq_lens - tokens)

    def _check_attention(self) -> None:
        if (got := self._config._attn_implementation) != NAME:
            raise ValueError(
                f"model: got attn_implementation {got!r}, expected {NAME!r}: others read all "
                "places of a row"
            )


class Rows(Cache):
    """Rows of a `RaggedStaticCache` in one call of the model.

    Attributes:
        position_ids: [batch, tokens] int32, the call's argument of this name; 0 for padding.
    """

    def __init__(self, layers: list[Any], position_ids: torch.Tensor, before: torch.Tensor) -> None:
        super().__init__(layers=layers)
        self.position_ids = position_ids
        self._before = before
        # The call's cosines and sines, which all layers share, and the table made of them.
        self._rotation: tuple[torch.Tensor, ...] | None = None

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return [batch] int32, where the first of the call's tokens stands."""
        return self._before

    def rotate_and_append(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_idx: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotate the call's q and k by RoPE and write k and v, in one kernel of a Hopper GPU.

        Args:
            q: [batch, tokens, heads_q, dim] of the cache's dtype.
            k: [batch, tokens, heads_kv, dim], likewise.
            v: like k.
            cos: [batch or 1, tokens, dim] floating, of two equal halves.
            sin: likewise.
            layer_idx: of the layer whose keys and values they are.

        Returns:
            q rotated, and all places of the rows: keys and values [batch, heads_kv, places, dim].

        Raises:
            TypeError: for another dtype.
            ValueError: for other rows or tokens than `rows` was given, or another shape.
        """
        layer: Any = self.layers[layer_idx]
        layer.check(k.size(0), k.size(1))
        positions, cos_sin = self._table(cos, sin)
        rotated = layer.append(k, v, positions=positions, cos_sin=cos_sin, q=q.flatten(0, 1))
        return rotated.view(q.shape), layer.keys, layer.values

    def _table(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `append_kv` takes: positions [batch * tokens] int32, and their `cos_sin`."""
        known = self._rotation
        # These very tensors: held here, so that no others can be in their place.
        if known is None or known[0] is not cos or known[1] is not sin:
            batch, half = self.position_ids.size(0), cos.size(-1) // 2
            halves = [x[..., :half].expand(batch, -1, -1) for x in (cos, sin)]
            cos_sin = torch.cat(halves, dim=-1).flatten(0, 1).float()
            positions = torch.arange(cos_sin.size(0), dtype=torch.int32, device=cos.device)
            known = self._rotation = (cos, sin, positions, cos_sin)
        return known[2], known[3]


class RowsLayer(CacheLayerMixin):
    """One layer's keys and values of some rows.

    Args:
        memory: [2, batch, heads_kv, places, dim].
        slots: [batch, tokens] int64, where the call's tokens are written, -1 for nowhere.
    """

    is_sliding = False

    def __init__(self, memory: torch.Tensor, slots: torch.Tensor) -> None:
        super().__init__()
        self._keys, self._values = self.keys, self.values = memory.unbind()
        self.is_initialized = True
        self._slots = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the call's tokens and return all places of the rows.

        Args:
            key_states: [batch, heads_kv, tokens, dim].
            value_states: likewise.

        Raises:
            ValueError: for other rows or tokens than `rows` was given.
        """
        self.check(key_states.size(0), key_states.size(2))
        self.append(key_states.transpose(1, 2), value_states.transpose(1, 2))
        return self._keys, self._values

    def append(self, k: torch.Tensor, v: torch.Tensor, **rotation: Any) -> Any:
        """Write the call's tokens by `append_kv`, and return what that does.

        Args:
            k: [batch, tokens, heads_kv, dim], of as many rows and tokens as there are slots.
            v: likewise.
            rotation: further arguments of `append_kv`, for RoPE.
        """
        return ops.append_kv(
            k.flatten(0, 1),
            v.flatten(0, 1),
            self._keys.transpose(1, 2),
            self._values.transpose(1, 2),
            self._slots.flatten(),
            **rotation,
        )

    def check(self, batch: int, tokens: int) -> None:
        """Refuse other rows or tokens than `rows` was given."""
        if (batch, tokens) != self._slots.shape:
            raise ValueError(
                f"past_key_values: got {batch} rows of {tokens} tokens, expected those of rows(): "
                f"{self._slots.size(0)} of {self._slots.size(1)}"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many places there are, from position 0 on."""
        return self._keys.size(2), 0

    def get_seq_length(self) -> int:
        """Refuse: there is not one length of all rows, from which positions could be counted.

        Raises:
            ValueError: always.
        """
        raise ValueError("position_ids: got None, expected those of rows()")

    def get_max_length(self) -> int:
        """Return how many tokens a row holds."""
        return self._keys.size(2)
