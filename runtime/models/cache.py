"""The paged KV cache: its memory, and which pages of it each sequence holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from ..ops.attention.l2_partition import L2Partition
from .config import ModelConfig
from .kv_format import KVFormat, ScaleKind
from .kv_storage import KVStorage, LayerKV, StoredPages
from .pages import DUMMY_PAGE, PagePool


@dataclass
class _SequencePages:
    length: int
    pages: list[int]
    version: int


@dataclass(frozen=True)
class SwappedSequence:
    """A sequence's keys and values with their scales, moved to host memory bit for bit."""

    length: int
    stored: StoredPages


class PagedKVCache:
    """Keys and values of all layers in pages of `page_size` tokens.

    Args:
        num_layers: of the model.
        num_pages: pages per layer, the dummy page 0 included.
        page_size: tokens per page, at least 1.
        num_kv_heads: KV heads of a layer.
        head_dim: elements of a head.
        dtype: of the keys and values; int8 and float8_e4m3fn take `scales`.
        device: of the keys and values.
        l2_partitioned: on a Hopper GPU, put pages where it is known which L2 partition holds them,
            if their sizes allow it, and each sequence's into one partition
            (docs/notebooks/l2_partition.md).
        one_order: as of `PagePool`, for ranks, which must find the same prefixes.
        scales: of 8 bits: "static" or "token"; see `KVFormat`. None otherwise.
        k_scale: static factors of keys, [num_layers] or [num_layers, num_kv_heads] fp32, finite and
            above 0; 1 by default.
        v_scale: likewise of values; given if k_scale is.

    Attributes:
        storage: [layers, 2, pages, page_size, heads_kv, dim], keys and values.
        l2_partition: for `paged_attention`; None where partitions are not known.
        prefix_tokens: tokens of all prefixes that `add` was given so far.
        shared_tokens: those of them that were in the cache already.

    Raises:
        ValueError: for a size below 1, fewer than 2 pages, a dtype that is none of a cache, and
            scales that do not go with it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        l2_partitioned: bool = True,
        one_order: bool = False,
        scales: ScaleKind | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        self.format = KVFormat(dtype, scales, k_scale, v_scale)
        sizes = {
            "num_layers": num_layers,
            "page_size": page_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: got {size}, expected at least 1")
        self.page_size = page_size
        self._pool = PagePool(num_pages)
        self._sequences: dict[int, _SequencePages] = {}
        self._versions = count(1)
        self.prefix_tokens = self.shared_tokens = 0
        shape = (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim)
        self._memory = KVStorage(shape, self.format, device, l2_partitioned=l2_partitioned)
        if self.l2_partition is not None:
            partition_of = self.l2_partition.partition_of_page
            self._pool = PagePool(num_pages, partition_of, one_order=one_order)

    @staticmethod
    def for_model(
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        device: torch.device | str,
        l2_partitioned: bool = True,
        one_order: bool = False,
        kv_format: KVFormat | None = None,
    ) -> PagedKVCache:
        """Return a cache of `num_pages` pages that fits the model, by default in its dtype."""
        kv_format = KVFormat(config.dtype) if kv_format is None else kv_format
        return PagedKVCache(
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=kv_format.dtype,
            device=device,
            l2_partitioned=l2_partitioned,
            one_order=one_order,
            scales=kv_format.scales,
            k_scale=kv_format.k_scale,
            v_scale=kv_format.v_scale,
        )

    @property
    def storage(self) -> torch.Tensor:
        """Keys and values, [layers, 2, pages, page_size, heads_kv, dim]."""
        return self._memory.values

    @property
    def scales(self) -> torch.Tensor | None:
        """Scales of tokens and heads, [layers, 2, pages, page_size, heads_kv] fp32, or None."""
        return self._memory.scales

    @property
    def l2_partition(self) -> L2Partition | None:
        """Where the pages are, for `paged_attention`; None where partitions are not known."""
        return self._memory.l2_partition

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all memory that the cache takes on its device."""
        return self._memory.tensors()

    def randomize(
        self, pages: Sequence[int] | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Fill pages with random numbers; see `KVStorage.randomize`."""
        self._memory.randomize(pages, generator)

    @property
    def usable_pages(self) -> int:
        """Pages that sequences can hold: all but the dummy page."""
        return self._pool.num_pages - 1

    @property
    def free_pages(self) -> int:
        """Pages that could be reserved now."""
        return self._pool.available

    @property
    def evictions(self) -> int:
        """Pages kept for later sequences that were given up so far."""
        return self._pool.evictions

    def pages_for(self, length: int) -> int:
        """Return how many pages `length` tokens fill."""
        return -(-length // self.page_size)

    def layer(self, index: int) -> LayerKV:
        """Return the keys, values and scales of one layer."""
        return self._memory.layer(index)

    def add(self, sequence: int, prefix: Sequence[int] = (), *, multiple_of: int = 1) -> int:
        """Start a sequence, sharing the pages of other sequences that begin with `prefix`.

        Args:
            sequence: the caller's id for it.
            prefix: tokens it will begin with; only whole pages of them can be shared.
            multiple_of: round the number of shared tokens down to a multiple of this.

        Returns:
            How many leading tokens of `prefix` are in the cache already.

        Raises:
            ValueError: when the id is in use, or `multiple_of` is below 1.
        """
        self._check_new("sequence", sequence)
        pages = self._match(prefix, multiple_of)
        self._pool.share(pages)
        length = len(pages) * self.page_size
        self._sequences[sequence] = _SequencePages(length, pages, next(self._versions))
        self.prefix_tokens += len(prefix)
        self.shared_tokens += length
        return length

    def pages_to_add(self, prefix: Sequence[int], length: int, *, multiple_of: int = 1) -> int:
        """Return how many of the free pages `add` and then `reserve` to `length` would take.

        Raises:
            ValueError: when `multiple_of` is below 1.
        """
        shared = self._match(prefix, multiple_of)
        return self.pages_for(length) - sum(self._pool.references(page) > 0 for page in shared)

    def fork(self, parent: int, child: int) -> None:
        """Start `child` as a copy of `parent`; their pages are shared until one writes to them.

        Raises:
            ValueError: when `parent` is unknown or `child` is in use.
        """
        self._check_new("child", child)
        held = self._held(parent)
        self._pool.share(held.pages)
        self._sequences[child] = _SequencePages(held.length, list(held.pages), next(self._versions))

    def reserve(self, sequence: int, length: int) -> None:
        """Grow a sequence to `length` tokens, so that its new tokens have slots to write to.

        Raises:
            ValueError: when the sequence is unknown or longer already.
            OutOfPagesError: when the pages do not suffice. Nothing is changed then.
        """
        held = self._held(sequence)
        if length < held.length:
            raise ValueError(f"length: got {length}, expected at least {held.length}")
        if length == held.length:
            return
        # New tokens go into the last page first, which must then belong to this sequence alone.
        copied = held.length % self.page_size and self._pool.references(held.pages[-1]) > 1
        missing = self.pages_for(length) - len(held.pages)
        if not missing and not copied:
            held.length = length
            return
        taken = self._pool.take(missing + bool(copied), like=held.pages[0] if held.pages else None)
        if copied:
            page = taken[-1]
            try:
                self._memory.copy_page(held.pages[-1], page)
            except BaseException:
                self._pool.release(taken)
                raise
            self._pool.release(held.pages[-1:])
            held.pages[-1] = taken.pop()
        held.pages.extend(taken)
        held.length = length
        held.version = next(self._versions)

    def free(self, sequence: int) -> None:
        """Give a sequence's pages back.

        Raises:
            ValueError: when the sequence is unknown.
        """
        self._pool.release(self._held(sequence).pages)
        del self._sequences[sequence]

    def publish(self, sequence: int, tokens: Sequence[int]) -> None:
        """Let later sequences share the full pages of this one, whose first tokens are `tokens`.

        Raises:
            ValueError: when the sequence is unknown or shorter than `tokens`.
        """
        held = self._held(sequence)
        if len(tokens) > held.length:
            raise ValueError(f"tokens: got {len(tokens)}, expected at most {held.length}")
        self._pool.publish(held.pages, tokens, self.page_size)

    def length(self, sequence: int) -> int:
        """Return how many tokens are reserved for a sequence."""
        return self._held(sequence).length

    def pages(self, sequence: int) -> list[int]:
        """Return the ids of a sequence's pages: its row of the page table."""
        return list(self._held(sequence).pages)

    def version(self, sequence: int) -> int:
        """Return a number that names these pages of the sequence, of all that ever were."""
        return self._held(sequence).version

    def slots(self, sequence: int, start: int, stop: int) -> list[int]:
        """Return the slots (page * page_size + offset) of positions `start` to `stop` - 1.

        Raises:
            ValueError: when the sequence is unknown or not that long.
        """
        held = self._held(sequence)
        if not 0 <= start <= stop <= held.length:
            raise ValueError(
                f"start, stop: got {start}, {stop}, expected 0 <= start <= stop <= {held.length}"
            )
        size = self.page_size
        return [held.pages[at // size] * size + at % size for at in range(start, stop)]

    def swap_out(self, sequence: int) -> SwappedSequence:
        """Copy a sequence to host memory and free its pages.

        Raises:
            ValueError: when the sequence is unknown.
        """
        held = self._held(sequence)
        swapped = SwappedSequence(held.length, self._memory.read(held.pages))
        self.free(sequence)
        return swapped

    def swap_in(self, sequence: int, swapped: SwappedSequence) -> None:
        """Start a sequence from host memory.

        Raises:
            ValueError: when the id is in use, or `swapped` is from another kind of cache.
            OutOfPagesError: when the pages do not suffice. Nothing is changed then.
        """
        self._check_new("sequence", sequence)
        count = swapped.stored.values.size(2)
        self._memory.check(swapped.stored, count)
        pages = self._pool.take(count)
        try:
            self._memory.write(pages, swapped.stored)
        except BaseException:
            self._pool.release(pages)
            raise
        self._sequences[sequence] = _SequencePages(swapped.length, pages, next(self._versions))

    def page_table(self, sequences: Sequence[int], width: int) -> torch.Tensor:
        """Return the page table [len(sequences), width] int32 on the CPU, filled with the dummy.

        Raises:
            ValueError: when a sequence is unknown or holds more than `width` pages.
        """
        table = torch.full((len(sequences), width), DUMMY_PAGE, dtype=torch.int32, device="cpu")
        for row, sequence in enumerate(sequences):
            pages = self._held(sequence).pages
            if len(pages) > width:
                raise ValueError(f"width: got {width}, expected at least {len(pages)} pages")
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")
        return table

    def _match(self, prefix: Sequence[int], multiple_of: int) -> list[int]:
        if multiple_of < 1:
            raise ValueError(f"multiple_of: got {multiple_of}, expected at least 1")
        pages = self._pool.match(prefix, self.page_size)
        while len(pages) * self.page_size % multiple_of:
            pages.pop()
        return pages

    def _check_new(self, name: str, sequence: int) -> None:
        if sequence in self._sequences:
            raise ValueError(f"{name}: got id {sequence}, which is in use; expected a new one")

    def _held(self, sequence: int) -> _SequencePages:
        if sequence not in self._sequences:
            raise ValueError(f"sequence: got id {sequence}, which is not in the cache")
        return self._sequences[sequence]
