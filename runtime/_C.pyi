"""The compiled loader (csrc/bindings.cpp). Pointers and streams are integers, 0 for null."""

from collections.abc import Sequence

ABI: dict[str, int]

# An address, then the strides of all dimensions but the last, in elements.
_Heads = tuple[int, int, int]
_Slots = tuple[int, int, int, int]

def is_capturing(stream: int) -> bool:
    """Return whether launches on the stream are being captured into a CUDA graph."""

class W8A8Gemm:
    """A loaded library whose launch takes `W8A8GemmParams` (csrc/gemm_w8a8/params.h)."""

    def __init__(self, path: str) -> None: ...
    def prepare(self) -> None: ...
    def launch(
        self,
        *,
        x: int,
        x_stride: int,
        w: int,
        w_stride: int,
        x_scale: int,
        x_scale_stride: int,
        w_scale: int,
        w_scale_stride: int,
        out: int,
        out_stride: int,
        m: int,
        n: int,
        k: int,
        stream: int,
        bias: int = 0,
        x_zero_point: int = 0,
        x_zero_point_stride: int = 0,
        w_sum: int = 0,
        n_active: int = 0,
        tile_channels: int = 0,
        tile_tokens: int = 0,
        cluster: int = 0,
        share_weights: int = 0,
        split_k: int = 0,
        band: int = 0,
        pdl: bool = False,
        best: int = 0,
        best_stride: int = 0,
        temperature: int = 0,
        repetition_penalty: int = 0,
    ) -> None: ...

class FusedLinear:
    """A loaded library whose launch takes `FusedLinearParams` (csrc/fused_linear/params.h)."""

    def __init__(self, path: str) -> None: ...
    def prepare(self) -> None: ...
    def launch(
        self,
        *,
        x: int,
        w: int,
        w_scale: int,
        w_scale_stride: int,
        out: int,
        n: int,
        k: int,
        stream: int,
        residual: int = 0,
        residual_out: int = 0,
        norm_weight: int = 0,
        eps: float = 0.0,
        bias: int = 0,
        pdl: bool = False,
    ) -> None: ...

class PagedDecode:
    """A loaded library whose launch takes `PagedDecodeParams` (csrc/attention/params.h)."""

    def __init__(self, path: str) -> None: ...
    def prepare(self) -> None: ...
    def workspace_bytes(self, rows: int, segments: int, tokens: int) -> int: ...
    def launch(
        self,
        *,
        q: _Heads,
        k_cache: _Slots,
        v_cache: _Slots,
        page_table: int,
        page_table_stride: int,
        seq_lens: int,
        out: _Heads,
        workspace: int,
        batch: int,
        heads_q: int,
        heads_kv: int,
        pages: int,
        page_size: int,
        max_pages: int,
        max_seqlen_q: int,
        scale: float,
        stream: int,
        cu_seqlens_q: int = 0,
        sinks: int = 0,
        lse: _Heads = ...,
        left: int = -1,
        right: int = 0,
        softcap: float = 0.0,
        k_scale: _Slots = ...,
        v_scale: _Slots = ...,
        pdl: bool = False,
        halves: Sequence[int] = (),
    ) -> None: ...

class Prefill:
    """Its launch takes `ScaledPrefillParams` (csrc/attention/prefill_params.h)."""

    def __init__(self, path: str) -> None: ...
    def prepare(self) -> None: ...
    def workspace_bytes(self) -> int: ...
    def launch(
        self,
        *,
        q: _Heads,
        k: _Slots,
        v: _Slots,
        out: _Heads,
        batch: int,
        heads_q: int,
        heads_kv: int,
        tokens_q: int,
        max_seqlen_q: int,
        scale: float,
        stream: int,
        workspace: int = 0,
        cu_seqlens_q: int = 0,
        cu_seqlens_k: int = 0,
        tokens_k: int = 0,
        max_seqlen_k: int = 0,
        seq_lens: int = 0,
        page_table: int = 0,
        page_table_stride: int = 0,
        pages: int = 0,
        page_size: int = 0,
        max_pages: int = 0,
        sinks: int = 0,
        lse: _Heads = ...,
        left: int = -1,
        right: int = 0,
        softcap: float = 0.0,
        least_rows: int = 0,
        pack: int = 0,
        pdl: bool = False,
        q_scale: int = 0,
        k_scale: int = 0,
        v_scale: int = 0,
        q_scale_stride: int = 0,
        k_scale_stride: int = 0,
        v_scale_stride: int = 0,
    ) -> None: ...

class Quantize:
    """Its launch takes `PaddedQuantizeParams` (csrc/gemm_w8a8/quantize_params.h)."""

    def __init__(self, path: str) -> None: ...
    def prepare(self) -> None: ...
    def launch(
        self,
        *,
        x: int,
        x_stride: int,
        out: int,
        out_stride: int,
        m: int,
        k: int,
        stream: int,
        scale_out: int = 0,
        static_scale: int = 0,
        zero_point: int = 0,
        residual: int = 0,
        residual_stride: int = 0,
        residual_out: int = 0,
        residual_out_stride: int = 0,
        norm_weight: int = 0,
        eps: float = 0.0,
        pdl: bool = False,
        n_active: int = 0,
        discard_x: bool = False,
    ) -> None: ...

class AppendKV:
    """A loaded library whose launch takes `AppendKVParams` (csrc/attention/params.h)."""

    def __init__(self, path: str) -> None: ...
    def prepare(self) -> None: ...
    def launch(
        self,
        *,
        k: _Heads,
        v: _Heads,
        k_cache: _Slots,
        v_cache: _Slots,
        slot_mapping: int,
        tokens: int,
        heads_kv: int,
        dim: int,
        page_size: int,
        stream: int,
        q: _Heads = ...,
        q_out: _Heads = ...,
        heads_q: int = 0,
        k_scale: _Slots = ...,
        k_scale_per_token: bool = False,
        v_scale: _Slots = ...,
        v_scale_per_token: bool = False,
        positions: int = 0,
        cos_sin: int = 0,
        cos_sin_stride: int = 0,
        rotary_dim: int = 0,
        interleaved: bool = False,
        q_norm_weight: int = 0,
        q_norm_is_fp32: bool = False,
        k_norm_weight: int = 0,
        k_norm_is_fp32: bool = False,
        norm_eps: float = 0.0,
        pdl: bool = False,
    ) -> None: ...

class Embed:
    """A loaded library whose launch takes `EmbedParams` (csrc/embed/params.h)."""

    def __init__(self, path: str) -> None: ...
    def prepare(self) -> None: ...
    def launch(
        self,
        *,
        tokens: int,
        table: int,
        table_stride: int,
        out: int,
        out_stride: int,
        rows: int,
        vocabulary: int,
        dim: int,
        stream: int,
        seen: int = 0,
        seen_stride: int = 0,
        seen_size: int = 0,
        seen_rows: int = 0,
        n_active: int = 0,
        pdl: bool = False,
    ) -> None: ...

class L2Probe:
    """A loaded library whose launch takes `L2ProbeParams` (csrc/l2/params.h)."""

    def __init__(self, path: str) -> None: ...
    def prepare(self) -> None: ...
    def launch(
        self,
        *,
        base: int,
        offsets: int,
        clocks: int,
        sms: int,
        count: int,
        by_all: bool,
        stream: int,
    ) -> None: ...

class MergeStates:
    """A loaded library whose launch takes `MergeStatesParams` (csrc/merge/params.h)."""

    def __init__(self, path: str) -> None: ...
    def prepare(self) -> None: ...
    def launch(
        self,
        *,
        o_a: _Heads,
        lse_a: _Heads,
        o_b: _Heads,
        lse_b: _Heads,
        out: _Heads,
        out_lse: _Heads,
        tokens: int,
        heads: int,
        dim: int,
        stream: int,
        pdl: bool = False,
    ) -> None: ...

class Sample:
    """A loaded library whose launch takes `SampleParams` (csrc/sampling/params.h)."""

    def __init__(self, path: str) -> None: ...
    def prepare(self) -> None: ...
    def launch(
        self,
        *,
        logits: int,
        logits_stride: int,
        temperature: int,
        top_k: int,
        top_k_is_int64: bool,
        top_p: int,
        min_p: int,
        seeds: int,
        counters: int,
        out: int,
        rows: int,
        vocabulary: int,
        stream: int,
        repetition_penalty: int = 0,
        seen: int = 0,
        seen_stride: int = 0,
        seen_rows: int = 0,
        pdl: bool = False,
        best: int = 0,
        best_stride: int = 0,
        parts: int = 0,
    ) -> None: ...
