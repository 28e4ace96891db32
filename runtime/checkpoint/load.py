"""Builds a model from a checkpoint folder."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace

import torch

from ..models import Decoder, DenseLinear, Linear, W8A8Linear, compile_kernels, family_of
from ..models.experts.products import Experts
from ..models.joined_linear import join
from ..models.modules import DENSE_DTYPES, Module
from ..models.parts import ExpertsPart, InputFactors, LinearPart, TensorPart
from ..models.ranks import ranks_of
from ..ops.collective.communicator import Communicator
from .config import load_config
from .errors import UnsupportedCheckpointError
from .folder import checkpoint_folder
from .format import StoredSchemeOf
from .layout import check_shares, check_tied, checked_layout, with_plain_routers
from .quantization import load_quantization
from .reader import CheckpointReader
from .scales import read_scale
from .section import CONFIG_FILE
from .storage.base import Kept, StoredScheme, Target, biases, stack
from .storage.dense import DENSE
from .weights import QUANTIZED_DTYPES, quantize_weight


def load_model(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    max_context: int | None = None,
    lm_head_dtype: torch.dtype | None = None,
    batch_invariant: bool = True,
    communicator: Communicator | None = None,
) -> Decoder:
    """Load a Hugging Face checkpoint folder of any family of `ostinato.models`.

    Of a model with several towers, such as vision and text, it is the text tower that is loaded.
    Reads plain bf16, fp16 and fp32 weights; compressed-tensors W8A8: INT8, with and without zero
    points of tokens, FP8, and FP8 in blocks of 128 by 128; Hugging Face `fp8` with a scale per
    tensor or block, and `fbgemm_fp8`; ModelOpt FP8, per tensor, per channel and token, or in
    blocks, and INT8 per channel, whose factors of SmoothQuant are folded into norms and rows in
    front. Weights of q, k, v and of gate, up that are stored alike are joined into one product:
    they keep their scales (one per output row from then on), and a static activation scale becomes
    the largest of the parts', so that nothing saturates that did not before. FP8 activations
    without a static scale are quantised per token, whatever granularity the file names, and
    whatever bound `fbgemm_fp8` puts on scales. Of a checkpoint made for an 8-bit KV cache the dtype
    and the scales are the model's `kv_scales`, by which an `Engine` serves it. Experts of a mixture
    may be stored one by one or together; those of a layer are grouped products. No tensor shares
    memory with the files. On CUDA quantised weights are packed for the kernels, one at a time, and
    kernels that are not compiled yet are compiled side by side.

    Args:
        path: folder with `config.json` and safetensors files, or the name of a model on the
            Hugging Face Hub, "owner/name", where huggingface_hub is installed: what its cache
            lacks is downloaded, safetensors and JSON files alone. A folder goes before a name.
        device: where the tensors go.
        dtype: of unquantised weights and activations: bf16, fp16 or fp32; default: the file's.
        max_context: longest sequence to serve, at most (and by default, up to 2^20 positions) the
            model's own. RoPE of the types longrope and dynamic is that of so long a sequence for
            shorter ones, too.
        lm_head_dtype: int8 or float8_e4m3fn: quantise an output projection that the file has not
            quantised, with a scale per row. By default it stays as it is.
        batch_invariant: whether what is generated has the same bits whatever other sequences are
            served beside it, at the price of the fastest kernels for up to 16 of them.
        communicator: joins the ranks that divide the model, this one among them; each of them
            calls this, with the same arguments but for `device`. A rank reads its share of the
            files alone, and its model computes the logits that all of them compute.

    Raises:
        CheckpointError: naming the file and the tensor, when something is missing, damaged,
            contradictory, NaN or infinite, no regular file, or a pattern of module names that
            takes too long to match. Headers of all files are checked before any data is read and
            before memory is taken for what config.json says.
        UnsupportedCheckpointError: naming the field, for a quantisation that is not implemented.
        UnsupportedModelError: for a model that is not implemented, naming a module or tensor that
            so many ranks cannot divide, or naming factors of SmoothQuant that cannot be folded.
        KernelBuildError: when compiling a kernel fails.
        TypeError, ValueError: for `dtype`, `max_context`, `lm_head_dtype` or `communicator`.
    """
    folder = checkpoint_folder("path", path, CONFIG_FILE, weights=True)
    config = load_config(folder)
    if dtype is not None:
        if dtype not in DENSE_DTYPES:
            expected = ", ".join(str(item) for item in DENSE_DTYPES)
            raise TypeError(f"dtype: got {dtype}, expected one of {expected}")
        config = replace(config, dtype=dtype)
    if lm_head_dtype is not None and lm_head_dtype not in QUANTIZED_DTYPES:
        expected = " or ".join(map(str, QUANTIZED_DTYPES))
        raise TypeError(f"lm_head_dtype: got {lm_head_dtype}, expected {expected}")
    device = torch.device(device)
    communicator = ranks_of(communicator, device)
    max_context = config.context(max_context)
    quantization = load_quantization(folder, text_tower=config.text_tower)
    scheme_of, kv_cache = quantization.scheme_of, quantization.kv_cache
    target = Target(device, config.dtype, batch_invariant)
    with CheckpointReader(folder, text_tower=config.text_tower) as reader:
        reader.check_layers(config.num_layers)
        layout = checked_layout(config, scheme_of, reader)
        scheme_of = with_plain_routers(scheme_of, layout)
        scales = () if kv_cache is None else kv_cache.tensors(config, reader)
        reader.check((*layout.tensors(scheme_of), *scales))
        kv_scales = None if kv_cache is None else kv_cache.read(config, reader)
        fingerprint = None
        if communicator is not None:
            told = f"{config} {lm_head_dtype} {max_context}"
            of_config = hashlib.blake2b(told.encode(), digest_size=4).hexdigest()
            fingerprint = f"config {of_config}, weights {reader.fingerprint()}"
            rank, size = communicator.rank, communicator.size
            layout = layout.shard(rank, size)
            check_shares(layout, scheme_of)
            if kv_scales is not None:
                kv_scales = kv_scales.shard(rank, size)
            config = config.of_rank(size)
        check_tied(reader, layout)
        loader = CheckpointLoader(
            reader,
            scheme_of,
            target,
            lm_head_dtype,
            has_kv_scales=kv_scales is not None,
            communicator=communicator,
        )
        model = family_of(config).load(
            config, layout, loader, max_context=max_context, batch_invariant=batch_invariant
        )
        model.kv_scales = kv_scales
        model.fingerprint = fingerprint
    compile_kernels(model)
    return model


@dataclass(frozen=True)
class CheckpointLoader:
    """Reads parts; see `ostinato.models.parts.Loader`."""

    reader: CheckpointReader
    scheme_of: StoredSchemeOf
    target: Target
    lm_head_dtype: torch.dtype | None
    has_kv_scales: bool = False
    communicator: Communicator | None = None

    def tensor(self, part: TensorPart) -> torch.Tensor:
        kept = Kept(part.spec, part.kept_rows)
        return stack(self.reader, [kept], part.dtype or self.target.dtype, self.target.device)

    def linear(self, part: LinearPart) -> Linear:
        target = replace(self.target, out_dtype=torch.float32) if part.chooses else self.target
        return join(
            [
                scheme.build(self.reader, run.modules, target)
                for scheme, run in part.runs(self.scheme_of)
            ]
        )

    def experts(self, part: ExpertsPart) -> Experts:
        return part.scheme(self.scheme_of).build_experts(self.reader, part, self.target)

    def input_factors(self, part: LinearPart) -> InputFactors | None:
        found = [self._factors(module) for module in part.modules]
        first, at = next(((item, i) for i, item in enumerate(found) if item is not None), (None, 0))
        if first is None:
            return None
        for module, factors in zip(part.modules, found, strict=True):
            if factors is None or not factors.values.equal(first.values):
                raise UnsupportedCheckpointError(
                    f"{first.where}: holds factors other than those of {module.name}, which reads "
                    f"the input of {part.modules[at].name}, too"
                )
        if self.has_kv_scales and part.kind == "per_token":
            raise UnsupportedCheckpointError(
                f"{first.where}: holds factors of attention's results beside scales of an 8-bit KV "
                "cache, whose values they would change"
            )
        return first

    def _factors(self, module: Module) -> InputFactors | None:
        """Return the factors of the kept columns of a module's input, None where all are 1."""
        spec = self.scheme_of(module.name).input_factors(module)
        if spec is None or not self.reader.has(spec):
            return None
        values = read_scale(self.reader, spec, positive=True)
        if module.kept_columns is not None:
            values = values[module.kept_columns]
        return None if values.eq(1).all() else InputFactors(values, self.reader.where(spec))

    def head(self, part: LinearPart | None, embedding: torch.Tensor) -> Linear:
        target = replace(self.target, out_dtype=torch.float32)
        if part is not None and self._scheme(part) != DENSE:
            return self._scheme(part).build(self.reader, part.modules, target)
        if self.lm_head_dtype is not None:
            return self._quantized_head(part, embedding, target, self.lm_head_dtype)
        if part is not None:
            return DENSE.build(self.reader, part.modules, target)
        return DenseLinear(embedding, out_dtype=target.out_dtype)

    def _scheme(self, part: LinearPart) -> StoredScheme:
        return self.scheme_of(part.modules[0].name)

    def _quantized_head(
        self, part: LinearPart | None, embedding: torch.Tensor, target: Target, dtype: torch.dtype
    ) -> W8A8Linear:
        """Return an output projection with 8-bit weights of one that is stored in 16 or 32."""
        plain = embedding if part is None else DENSE.plain(self.reader, part.modules, target)
        weight, scale = quantize_weight(plain, dtype, torch.float32)
        return W8A8Linear(
            weight=weight,
            weight_scale=scale.squeeze(1),
            out_dtype=target.results,
            bias=None if part is None else biases(self.reader, part.modules, target),
            batch_invariant=target.batch_invariant,
        )
