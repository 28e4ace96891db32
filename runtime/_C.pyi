"""The compiled loader (csrc/bindings.cpp). Pointers and streams are integers, 0 for null."""

from collections.abc import Callable, Sequence
from typing import Any

ABI: dict[str, int]

# An address, then the strides of all dimensions but the last, in elements.
_Heads = tuple[int, int, int]
_Slots = tuple[int, int, int, int]

def is_capturing(stream: int) -> bool:
    """Return whether launches on the stream are being captured into a CUDA graph."""

def launch_graph(executable: int, stream: int) -> int:
    """Launch an instantiated graph of the current device, and return the driver's CUresult.

    Raises:
        RuntimeError: without a CUDA driver; an `executable` that is none crashes.
    """

def note_fork() -> None:
    """Tell every `Repeat` that this is a fork of the process that it learnt its run in."""

class RunCounts:
    """How a graph was used since the last capture."""

    def __init__(self) -> None: ...
    def add(self, n: int, replayed: bool = True) -> None:
        """Note a run of `n` rows, by a replay or by a call of the step."""

    def read(self) -> tuple[int, int, int]:
        """Return replays, calls of the step, and rows, all of one moment."""

class Turn:
    """One turn that callers in any thread take, one at a time.

    Attributes:
        owner, what: of the call that has it, or had it last.
        last_stream: the handle of the stream of the last call; -1 where there was none, or it is
            not sure to be there still.
    """

    last_stream: int
    @property
    def owner(self) -> object: ...
    @property
    def what(self) -> str: ...
    def __init__(self) -> None: ...
    def take(self, owner: object, what: str, timeout_s: float = 0.0) -> bool:
        """Take the turn; False if it is not free.

        Other threads are waited for so many seconds, with the GIL released.
        """

    def forget(self) -> None:
        """Let every `Repeat` of this turn forget its runs; whoever calls it has the turn."""

    def end(self) -> None:
        """Give the turn back."""

class Hold:
    """Has a turn inside of a `with` statement, which no exception of a signal handler can lose.

    Args:
        turn, owner, what, timeout_s: as `Turn.take` says.
        is_run: else every `Repeat` forgets its runs.
        check: called when the turn has been taken; it is given back if this raises.
        refuse: called with owner and what when the turn is not free; it must raise.
    """

    def __init__(
        self,
        turn: Turn,
        owner: object,
        what: str,
        timeout_s: float = 0.0,
        *,
        is_run: bool = False,
        check: Callable[[], None] | None = None,
        refuse: Callable[[object, str], object],
    ) -> None: ...
    def __enter__(self) -> Hold: ...
    def __exit__(self, *error: object) -> None: ...
    def detach(self) -> None:
        """Let the turn outlast the statement: any thread may `end` it, or wait for that."""

    def end(self) -> None:
        """Give the turn back, if it is still had; again does nothing."""

class Closing:
    """Counts the calls that wait to close a runner, each inside of a `with` statement.

    While there are any (then this is true), no run is repeated in the turn.
    """

    def __init__(self, turn: Turn) -> None: ...
    def __bool__(self) -> bool: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class Repeat:
    """Repeats runs without a frame of Python, while nothing but runs is done in their turn.

    Args:
        current_stream, device: on CUDA a function of the device's index that returns the handle of
            the caller's stream, and that index; without them runs are in program order.
        current_device: a function that returns the current device's index, where it may be another.

    Attributes:
        runs_to_look: runs until declared memory must be looked at.
    """

    runs_to_look: int

    def __init__(
        self,
        current_stream: Callable[[int], int] | None = None,
        device: int | None = None,
        current_device: Callable[[], int] | None = None,
    ) -> None: ...
    def run(self, owner: object, n: int, inputs: object, variant: object) -> Any:
        """Run once more: take the turn, stage, launch, count, and return the outputs.

        Returns:
            None, when nothing has been done, because this run is not known; the turn is taken, or
            somebody waits to close a runner; the caller's stream is another than that of the last
            call, or is being captured; this is a fork; or `look` finds something.
        """

    def learn(
        self,
        *,
        turn: Turn,
        n: int,
        variant: object,
        batch_size: int,
        stager: object,
        executable: int,
        replay: Callable[[], None],
        counts: RunCounts,
        look: Callable[[], object],
        runs_per_look: int,
        rows: tuple[Any, list[tuple[Any, Any, Any, Any]]],
        remake: Callable[[int], Any],
    ) -> None:
        """Take note of a run that has just been made, in the place of another if there are many.

        There is room for 128 runs, four for each `n` modulo 32.

        Args:
            turn: its caller has it, and it is the same until everything is forgotten.
            n: rows.
            variant: of them; runs are found by both.
            batch_size: of the graph.
            stager: its `stage(inputs, n, batch_size)` writes the inputs.
            executable: the graph, or 0 where `replay` must be called.
            replay: called also when the driver refuses, to say why.
            counts: of the graph.
            look: returns None unless memory has moved.
            runs_per_look: how often it is called.
            rows: the outputs, and each tensor of them with its shape, strides and address; outputs
                in a dict are copied.
            remake: returns the outputs of `n` rows where a tensor no longer has these.
        """

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
