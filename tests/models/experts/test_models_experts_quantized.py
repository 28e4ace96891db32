"""What our quantiser writes of models with experts, against fake-quantised twins."""

from __future__ import annotations

from pathlib import Path

import block_files
import pytest
from hf_experts import WITH_EXPERTS
from hf_models import hf_logits, random_model, save_plain
from quantized_files import FORMATS, sturdy_tokens, write_quantized

from effort import effort
from ostinato.checkpoint import load_model, quantize_checkpoint
from ostinato.models import sequence_logits

# Of those that differ in their attention, or in MLPs beside experts, one alone.
MODELS = effort([name for name in WITH_EXPERTS if "-" not in name], list(WITH_EXPERTS))
IN_FP8 = effort(["mixtral", "granitemoe"], MODELS)
# Those of Granite are stored together: a block of their files has rows of gate and of up.
IN_BLOCKS = effort(["glm4_moe"], [name for name in MODELS if name != "granitemoe"])
BLOCKS = block_files.BlockFormat(block_files.compressed_tensors(), suffix="weight_scale")


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *((name, "int8") for name in MODELS),
        *((name, "fp8") for name in IN_FP8),
        *((name, "fp8-block") for name in IN_BLOCKS),
    ],
)
def test_our_quantisers_files_equal_a_fake_quantized_twin(
    name: str, scheme: str, tmp_path: Path
) -> None:
    hf = random_model(WITH_EXPERTS[name])
    if scheme == "fp8-block":
        twin = block_files.write_blocks(tmp_path / "twin", hf, BLOCKS).twin()
    else:
        form = FORMATS[f"ct-{scheme}-dynamic"]
        twin = write_quantized(tmp_path / "twin", hf, form).twin()
    tokens = sturdy_tokens(twin, 3 if scheme == "fp8-block" else 6)
    quantize_checkpoint(save_plain(tmp_path / "plain", hf), tmp_path / "ours", scheme=scheme)
    theirs = hf_logits(twin, tokens)
    assert (theirs - hf_logits(hf, tokens)).abs().max() > 0.01, "nothing was quantised"
    # Ours, and what others would have written of the same weights.
    for folder in ("ours", "twin"):
        ours = sequence_logits(load_model(tmp_path / folder), tokens)
        assert (ours - theirs).abs().max() <= 1e-4
