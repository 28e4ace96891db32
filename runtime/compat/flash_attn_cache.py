"""FlashAttention's two kinds of caches as pages, and appending to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..ops.common import checks

_INT32 = (torch.int32,)


@dataclass(frozen=True)
class Cache:
    """Keys and values in pages; a cache with a row for each sequence has one page in each row.

    Args:
        k, v: [pages, page_size, heads_kv, dim].
        table: [batch, pages of a sequence] int32.
        lengths: [batch] int32, tokens before anything is appended.
        told_by: the argument that the table comes from.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    told_by: str = "k_cache"

    @staticmethod
    def of(
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor | None,
        cache_batch_idx: torch.Tensor | None,
        cache_seqlens: int | torch.Tensor | None,
        batch: int,
    ) -> Cache:
        """Return the cache of `flash_attn_with_kvcache`, whose arguments these are.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        if not isinstance(k_cache, torch.Tensor) or k_cache.ndim != 4:
            got = list(k_cache.shape) if isinstance(k_cache, torch.Tensor) else k_cache
            raise ValueError(f"k_cache: got {got}, expected [rows, capacity, heads_kv, dim]")
        device, told_by = k_cache.device, "k_cache"
        if block_table is not None:
            if cache_batch_idx is not None:
                raise ValueError("cache_batch_idx: got a tensor, expected None with block_table")
            checks.tensor("block_table", block_table, _INT32, (batch, "blocks"), device)
            table, told_by = block_table, "block_table"
        elif cache_batch_idx is not None:
            checks.tensor("cache_batch_idx", cache_batch_idx, _INT32, (batch,), device)
            table, told_by = cache_batch_idx.unsqueeze(1), "cache_batch_idx"
        elif k_cache.size(0) < batch:
            raise ValueError(
                f"k_cache: got {k_cache.size(0)} rows, expected one for each of {batch}"
            )
        else:
            table = torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1)
        if cache_seqlens is None:
            cache_seqlens = table.size(1) * k_cache.size(1)
        if isinstance(cache_seqlens, torch.Tensor):
            checks.tensor("cache_seqlens", cache_seqlens, _INT32, (batch,), device)
        else:
            checks.integer("cache_seqlens", cache_seqlens, least=0)
            if cache_seqlens > checks.INT32_MAX:
                raise ValueError(f"cache_seqlens: got {cache_seqlens}, expected an int32")
            cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
        return Cache(k_cache, v_cache, table, cache_seqlens, told_by)

    def check_pages(self, seqlen_new: int, whole: bool) -> None:
        """Check the pages that an append writes, where the host sees them: on a CPU.

        Args:
            seqlen_new: tokens that each sequence gets.
            whole: whether all keys are read: the pages before the new tokens are checked, too.

        Raises:
            ValueError: naming the argument that has them.
        """
        if self.table.size(1) == 0:
            raise ValueError(f"{self.told_by}: got no page, expected one or more for k and v")
        if self.table.is_cuda or torch.compiler.is_compiling():
            return
        page_size, blocks = self.k.size(1), self.k.size(0)
        slots: set[int] = set()
        for row, length in zip(self.table.tolist(), self.lengths.tolist(), strict=True):
            end = min(length + seqlen_new, len(row) * page_size)
            first = max(length, 0)
            for entry in range(0 if whole else first // page_size, -(-max(end, 0) // page_size)):
                if not 0 <= row[entry] < blocks:
                    raise ValueError(
                        f"{self.told_by}: got {row[entry]}, expected 0 to {blocks - 1} for each "
                        "page that is read or written"
                    )
            for at in range(first, end):
                slot = row[at // page_size] * page_size + at % page_size
                if slot in slots:
                    raise ValueError(
                        f"{self.told_by}: got {row[at // page_size]} for two tokens at one place, "
                        "expected a place of its own for each new token"
                    )
                slots.add(slot)

    def table_beyond(self, seqlen_new: int) -> torch.Tensor:
        """Return the table, made longer for new tokens without room.

        Their keys count, though nobody wrote them, so that queries stand where they do with room.
        """
        more = -(-seqlen_new // self.k.size(1))
        return torch.cat([self.table, self.table[:, -1:].expand(-1, more)], dim=1)

    def append(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        interleaved: bool,
        local: bool,
    ) -> torch.Tensor:
        """Write k and v, rotated if there are angles, and return q, rotated likewise.

        Args:
            q: [batch * seqlen_q, heads_q, dim].
            k: [batch, seqlen_new, heads_kv, dim].
            v: like k.
            cos: [positions, rotary_dim / 2] for as many positions as the cache holds, or None.
            sin: like cos.
            interleaved: which elements are pairs.
            local: whether queries stand where new tokens do, not all where the first one does.
        """
        batch, seqlen_new = k.shape[:2]
        positions = self._positions(seqlen_new)
        keys, values = k.flatten(0, 1), v.flatten(0, 1)
        slots = self._slots(positions).flatten()
        if cos is None or sin is None:
            ops.append_kv(keys, values, self.k, self.v, slots)
            return q
        angles = torch.cat([cos, sin], dim=1).float()
        # What has no room, or no place, is not written, but its angles are read.
        last = cos.size(0) - 1
        seqlen_q = q.size(0) // max(batch, 1)
        at_new_tokens = seqlen_q == seqlen_new and (local or seqlen_new == 1)
        rotated = ops.append_kv(
            *(keys, values, self.k, self.v, slots),
            positions=positions.clamp(0, last).flatten(),
            cos_sin=angles,
            q=q if at_new_tokens else None,
            interleaved=interleaved,
        )
        if rotated is not None:
            return rotated
        positions = self._positions(seqlen_q) if local else self.lengths.unsqueeze(1)
        # An append that writes nothing: q is what it is called for.
        unwritten = q[:, : k.size(2)]
        rotated = ops.append_kv(
            *(unwritten, unwritten, self.k, self.v),
            torch.full((q.size(0),), -1, dtype=torch.int64, device=q.device),
            positions=positions.expand(batch, seqlen_q).clamp(0, last).flatten(),
            cos_sin=angles,
            q=q,
            interleaved=interleaved,
        )
        assert rotated is not None, "q was given"
        return rotated

    def check_angles(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Check rotary tables: alike, and for every position that the cache has room for."""
        device = self.k.device
        shape = ("positions", "rotary_dim / 2")
        checks.tensor("rotary_cos", cos, checks.FLOAT_DTYPES, shape, device, any_strides=True)
        checks.tensor("rotary_sin", sin, (cos.dtype,), cos.shape, device, any_strides=True)
        room, widest = self.table.size(1) * self.k.size(1), self.k.size(3) // 2
        if not 0 < cos.size(1) <= widest:
            raise ValueError(
                f"rotary_cos: got {cos.size(1)} angles of a position, expected 1 to {widest}, half "
                "of the head dim"
            )
        if cos.size(0) < room:
            raise ValueError(
                f"rotary_cos: got {cos.size(0)} positions, expected at least the cache's {room}"
            )

    def _positions(self, count: int) -> torch.Tensor:
        """Return [batch, count] int32, the positions of so many tokens after those there."""
        after = torch.arange(count, dtype=torch.int32, device=self.lengths.device)
        return self.lengths.unsqueeze(1) + after

    def _slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots [batch, count] int64 of positions, -1 for those without a page."""
        page_size, pages = self.k.size(1), self.table.size(1)
        entry = positions // page_size
        page = self.table.gather(1, entry.clamp(0, pages - 1).long())
        slots = page.long() * page_size + positions % page_size
        none = (entry < 0) | (entry >= pages) | (page < 0) | (page >= self.k.size(0))
        return slots.masked_fill(none, -1)
