"""SGLang's attention backend "ostinato": paged attention on its pool of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from ... import ops
from ...ops.attention.decode_cuda import decode_kernels
from ...ops.attention.decode_variants import AttentionDecode
from ...ops.common.sizes import ceil_div, power_of_two

_CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Batch:
    """What attention needs to know of a batch, on the device.

    Args:
        seq_lens: [requests] int32, keys of each, those of this step included.
        page_table: [requests, pages of the longest context] int32.
        cu_seqlens_q: [requests + 1] int32, None for one query each.
        max_seqlen_q: the most queries of a request.
        max_tokens_k: tokens of all requests, as of `ops.paged_attention`; None: not known.
    """

    seq_lens: torch.Tensor
    page_table: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int = 1
    max_tokens_k: int | None = None


class OstinatoBackend(AttentionBackend):  # type: ignore[misc]
    """Attention of decoding and prefill by `ostinato.ops.paged_attention`.

    Keys and values stay in SGLang's pool, which is read in pages of its `--page-size`: multiples of
    16 are fastest. Lengths and page tables are made on the device, so that a decode step can be
    captured. With `--enable-deterministic-inference` a request's bits do not depend on the others
    of its batch, as long as its prompt is computed whole.

    Args:
        runner: SGLang's model runner.

    Raises:
        ValueError: naming what the backend does not have: speculative decoding, multi-head latent
            attention, encoders, context parallelism, pools of sliding windows, or of a layout other
            than tokens first, or of another dtype; a GPU or heads without kernels.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if runner.spec_algorithm.is_speculative():
            raise ValueError("speculative-algorithm: got one, expected none with backend ostinato")
        if runner.use_mla_backend:
            raise ValueError("model: got multi-head latent attention, expected another backend")
        if runner.is_hybrid_swa:
            raise ValueError(
                "model: got a pool of its own for sliding windows, expected "
                "--disable-hybrid-swa-memory with backend ostinato"
            )
        _check_options(runner.server_args)
        if getattr(runner.model_config, "is_encoder_decoder", False):
            raise ValueError("model: got an encoder and a decoder, expected a decoder alone")
        # Models and SGLang's other backends find them here, by these names.
        self.token_to_kv_pool = self._pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_index_translator: Any = None
        _check_pool(getattr(self._pool, "full_kv_pool", self._pool))
        self._page_size = runner.page_size
        self._req_to_token = runner.req_to_token_pool.req_to_token
        if self._req_to_token.is_cuda:
            capability = torch.cuda.get_device_capability(self._req_to_token.device)
            check_kernels(capability, runner.model_config)
        self._max_pages = ceil_div(runner.model_config.context_len, self._page_size)
        self._deterministic = bool(runner.server_args.enable_deterministic_inference)
        device = self._req_to_token.device
        self._one = torch.ones((), dtype=torch.float32, device=device)
        # Of the largest captured batch.
        self._graph_seq_lens: torch.Tensor | None = None
        self._graph_table: torch.Tensor | None = None
        self.forward_metadata: Batch | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Note lengths and pages of a batch that is not captured."""
        seq_lens = forward_batch.seq_lens.to(torch.int32)
        table = self._pages_of(forward_batch.req_pool_indices)
        if forward_batch.forward_mode.is_decode_or_idle():
            self.forward_metadata = Batch(seq_lens, table)
            return
        mode = forward_batch.forward_mode
        if mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            raise ValueError(f"forward_mode: got {mode.name}, expected DECODE, EXTEND or MIXED")
        queries = forward_batch.extend_seq_lens
        starts = torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0))
        new = [int(length) for length in forward_batch.extend_seq_lens_cpu]
        # A power of two, so that what is kept for them grows a few times, not in every step.
        tokens = power_of_two(sum(new) + sum(map(int, forward_batch.extend_prefix_lens_cpu)))
        self.forward_metadata = Batch(seq_lens, table, starts, max([*new, 1]), tokens)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Reserve lengths and page tables of captured batches, of one query a request."""
        device = self._req_to_token.device
        self._graph_seq_lens = torch.zeros(max_bs, dtype=torch.int32, device=device)
        shape = (max_bs, self._max_pages)
        self._graph_table = torch.zeros(shape, dtype=torch.int32, device=device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Choose the memory of a captured batch; nothing is computed here."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise ValueError(
                f"forward_mode: got {forward_batch.forward_mode.name} in a graph, expected DECODE "
                "with backend ostinato"
            )
        assert self._graph_seq_lens is not None, "init_cuda_graph_state comes first"
        assert self._graph_table is not None
        requests = forward_batch.batch_size
        self.forward_metadata = Batch(self._graph_seq_lens[:requests], self._graph_table[:requests])

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Write lengths and pages of a captured batch, by kernels that replay with it."""
        held = self.forward_metadata
        assert held is not None
        requests = held.seq_lens.size(0)
        held.seq_lens.copy_(forward_batch.seq_lens[:requests])
        held.page_table.copy_(self._pages_of(forward_batch.req_pool_indices[:requests]))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of padding: one key, in the pool's row for padding."""
        return 1

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Attend with one query of each request; see `forward_extend`."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, options)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Attend with the queries of prompts, or parts of them.

        Args:
            q: [tokens, heads_q * dim].
            k: [tokens, heads_kv, dim], written to the pool if `save_kv_cache`; None where it is
                there already.
            v: likewise.
            layer: SGLang's RadixAttention.
            forward_batch: of the step.
            save_kv_cache: whether k and v are to be written.
            options: `sinks` [heads_q]; others are refused.

        Returns:
            [tokens, heads_q * value_dim].

        Raises:
            ValueError: naming the argument, for what would change the result and is not built.
        """
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, options)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        options: dict[str, Any],
    ) -> torch.Tensor:
        sinks = options.pop("sinks", None)
        if others := [name for name, value in options.items() if value is not None]:
            raise ValueError(f"{others[0]}: got a value, expected None with backend ostinato")
        _check_layer(layer)
        if k is not None and v is not None and save_kv_cache:
            where = KVWriteLoc.for_batch(forward_batch)
            self._pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        keys, values = (
            held.unflatten(0, (-1, self._page_size))
            for held in self._pool.get_kv_buffer(layer.layer_id)
        )
        eight_bits = keys.itemsize == 1
        batch = self.forward_metadata
        assert batch is not None, "init_forward_metadata comes first"
        window = layer.sliding_window_size
        out = ops.paged_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            values,
            batch.page_table,
            batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=batch.max_seqlen_q,
            max_tokens_k=batch.max_tokens_k,
            scale=layer.scaling,
            causal=layer.attn_type is AttentionType.DECODER,
            window=(window, -1) if window >= 0 else None,
            softcap=layer.logit_cap,
            sinks=None if sinks is None else sinks.float(),
            k_scale=self._scale(layer.k_scale) if eight_bits else None,
            v_scale=self._scale(layer.v_scale) if eight_bits else None,
            batch_invariant=self._deterministic,
        )
        assert isinstance(out, torch.Tensor), "return_lse is not asked for"
        return out.flatten(1)

    def _pages_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [rows, pages of the longest context] int32, the pages of requests' tokens."""
        slots = self._req_to_token[:, :: self._page_size][:, : self._max_pages]
        pages: torch.Tensor = slots.index_select(0, rows) // self._page_size
        return pages.contiguous()

    def _scale(self, scale: torch.Tensor | None) -> torch.Tensor:
        """Return the factor of an 8-bit cache, 1 for a checkpoint that has none."""
        return self._one if scale is None else scale.float().reshape(())


def _check_options(args: Any) -> None:
    """Refuse options of the server that change what a backend has to do."""
    for name, most in (
        ("dcp_size", 1),
        ("attn_cp_size", 1),
        ("enable_prefill_cp", False),
        ("enable_pdmux", False),
    ):
        if (got := getattr(args, name, most) or most) != most:
            flag = name.replace("_", "-")
            raise ValueError(f"{flag}: got {got}, expected {most} with backend ostinato")


def _check_pool(pool: Any) -> None:
    """Refuse a pool of keys and values that the ops do not read."""
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise ValueError(f"KV cache: got layout {layout}, expected nhd with backend ostinato")
    dtype = getattr(pool, "dtype", torch.bfloat16)
    if dtype not in _CACHE_DTYPES:
        expected = ", ".join(str(known).removeprefix("torch.") for known in _CACHE_DTYPES)
        raise ValueError(f"kv-cache-dtype: got {dtype}, expected one of {expected}")


def check_kernels(capability: tuple[int, int], config: Any) -> None:
    """Refuse a GPU, or heads, for which there are torch's operators alone.

    These would go through all of a context for each step, as long as SGLang lets one be.

    Args:
        capability: of the GPU, (9, 0) for sm_90.
        config: SGLang's of the model.
    """
    if not AttentionDecode.supports(capability):
        major, minor = capability
        raise ValueError(
            f"device: got sm_{major}{minor}, expected a Hopper GPU (sm_90) with backend ostinato"
        )
    dim = config.head_dim
    value_dim = getattr(config, "v_head_dim", None) or dim
    group = config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads)
    if value_dim != dim or not decode_kernels(config.dtype, dim, group):
        raise ValueError(
            f"model: got heads of {dim} and {value_dim} elements, {group} of queries for one of "
            f"keys, in {config.dtype}, for which backend ostinato has no kernel"
        )


def _check_layer(layer: Any) -> None:
    """Refuse a layer that computes something else."""
    if getattr(layer, "xai_temperature_len", -1) > 0:
        raise ValueError(
            f"xai_temperature_len: got {layer.xai_temperature_len}, expected none with backend "
            "ostinato"
        )
    if layer.is_cross_attention:
        raise ValueError("layer: got cross attention, expected self attention")
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        raise ValueError(
            f"logit_capping_method: got {layer.logit_capping_method!r}, expected 'tanh'"
        )
    if layer.attn_type is not AttentionType.DECODER:
        raise ValueError(f"attn_type: got {layer.attn_type}, expected DECODER")
