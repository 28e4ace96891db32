"""Ops of Ostinato, on CPU and CUDA tensors: embedding, attention, linear, norms, sampling and more.

Common to all of them:

- `stream`: a `torch.cuda.Stream` or its integer handle, on which the op is launched as if under
  `torch.cuda.stream`; None means torch's current stream. CPU tensors take only None.
- `out`, where there is one, is written and returned; it must not overlap the inputs unless the
  op says so. The elements of every tensor's last dimension must be adjacent; other strides are
  free, but that no dimension of a tensor that is written may have been expanded.
- Bad arguments raise TypeError or ValueError, naming the argument, before anything is written.
- The result of a row, and of a sequence, does not depend on the others of the call, to the bit. On
  CUDA that holds for `w8a8_linear` in FP8, `fp8_block_linear` and `paged_attention` with
  `batch_invariant=True`, and
  not for `varlen_attention`: how its work is cut follows from the average of the queries.
- On CUDA nothing is read back to the host, unless `check_bounds` asks for it, so that every op can
  be captured in a graph. Values that change between replays live in tensors; Python numbers are
  frozen by capture.
- On GPUs from sm_80 on `embed`, quantisation, norms, activation functions, `append_kv`,
  `merge_states`, `moe_route`, `moe_combine`, `softcap`, `process_logits`, `sample`,
  `token_logprobs` and collectives between GPUs that reach each other's memory are kernels of ours,
  on Hopper GPUs W8A8 and 16-bit products, those of experts among them, and attention too
  (`python -m ostinato env` lists them). They are compiled on first use (`python -m ostinato build`
  does it before) and, from sm_90 on, launched so that they overlap the end of the kernel before
  them; what this asks of packed weights and norm weights, those ops say. All else runs on torch's
  operators.
- `all_reduce`, `all_gather` and `all_reduce_norm…` are collectives: every rank of a tensor-parallel
  group calls them, in one order, with tensors of one shape. See `Communicator`.
- The ops are for inference: results carry no gradient.
- Arithmetic is fp32 inside, rounded once to the output's dtype. Ops that multiply fp32 matrices
  raise RuntimeError while torch is set to do that in TF32 or bf16
  (`torch.set_float32_matmul_precision`). `ostinato.ops.reference` has a readable twin of every op.
"""

from .attention.append_kv import append_kv
from .attention.l2_partition import L2Partition
from .attention.merge_states import merge_states
from .attention.paged import paged_attention
from .attention.varlen import varlen_attention
from .attention.workspace import paged_attention_workspace, varlen_attention_workspace
from .collective.all_reduce_norm import (
    all_reduce_norm,
    all_reduce_norm_quantize,
    all_reduce_norm_quantize_per_group,
)
from .collective.communicator import (
    Communicator,
    CommunicatorError,
    GroupCommunicator,
    all_gather,
    all_reduce,
)
from .collective.partial_sum import PartialSum
from .embed import embed
from .linear.activation import activation, activation_quantize, silu_mul, silu_mul_quantize
from .linear.block_linear import fp8_block_linear
from .linear.block_scales import channel_scales
from .linear.fused import dynamic_w8a8_linear, rms_norm_w8a8_linear, rms_norm_w8a8_mlp
from .linear.linear import linear, w8a8_linear
from .linear.lm_head import Logits, linear_logits, rms_norm_w8a8_logits
from .linear.norms import layer_norm, layer_norm_quantize, rms_norm, rms_norm_quantize
from .linear.packed_weight import PackedWeight, pack_weight
from .linear.quantize import quantize_per_tensor, quantize_per_token
from .linear.quantize_asymmetric import (
    activation_quantize_asymmetric,
    layer_norm_quantize_asymmetric,
    quantize_asymmetric,
    rms_norm_quantize_asymmetric,
)
from .linear.quantize_groups import (
    activation_quantize_per_group,
    layer_norm_quantize_per_group,
    quantize_per_group,
    rms_norm_quantize_per_group,
    silu_mul_quantize_per_group,
)
from .moe.combine import Combined, moe_combine
from .moe.moe_linear import moe_linear
from .moe.packed_experts import PackedExperts, pack_experts
from .moe.plan import MoePlan
from .moe.route import moe_route
from .sampling.process_logits import LogitsTables, process_logits
from .sampling.sample import sample
from .sampling.softcap import softcap
from .sampling.token_logprobs import RowLogprobs, token_logprobs

__all__ = [
    "Combined",
    "Communicator",
    "CommunicatorError",
    "GroupCommunicator",
    "L2Partition",
    "Logits",
    "LogitsTables",
    "MoePlan",
    "PackedExperts",
    "PackedWeight",
    "PartialSum",
    "RowLogprobs",
    "activation",
    "activation_quantize",
    "activation_quantize_asymmetric",
    "activation_quantize_per_group",
    "all_gather",
    "all_reduce",
    "all_reduce_norm",
    "all_reduce_norm_quantize",
    "all_reduce_norm_quantize_per_group",
    "append_kv",
    "channel_scales",
    "dynamic_w8a8_linear",
    "embed",
    "fp8_block_linear",
    "layer_norm",
    "layer_norm_quantize",
    "layer_norm_quantize_asymmetric",
    "layer_norm_quantize_per_group",
    "linear",
    "linear_logits",
    "merge_states",
    "moe_combine",
    "moe_linear",
    "moe_route",
    "pack_experts",
    "pack_weight",
    "paged_attention",
    "paged_attention_workspace",
    "process_logits",
    "quantize_asymmetric",
    "quantize_per_group",
    "quantize_per_tensor",
    "quantize_per_token",
    "rms_norm",
    "rms_norm_quantize",
    "rms_norm_quantize_asymmetric",
    "rms_norm_quantize_per_group",
    "rms_norm_w8a8_linear",
    "rms_norm_w8a8_logits",
    "rms_norm_w8a8_mlp",
    "sample",
    "silu_mul",
    "silu_mul_quantize",
    "silu_mul_quantize_per_group",
    "softcap",
    "token_logprobs",
    "varlen_attention",
    "varlen_attention_workspace",
    "w8a8_linear",
]
