"""What a library's hash depends on: every file it includes, every flag, and the mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from jit_probe import Probe

from ostinato.jit.compiler import plan
from ostinato.jit.mode import RELEASE, BuildMode, delay_sites
from ostinato.jit.sources import CSRC, read_sources
from ostinato.jit.targets import target_named
from ostinato.jit.variant import Variant
from ostinato.ops.linear.gemm_variants import GemmTiled
from ostinato.ops.linear.quantize_cuda import Quantize


@dataclass(frozen=True, kw_only=True)
class Scratch(Variant):
    """A kernel whose source a test writes."""

    family: ClassVar[str] = "scratch"
    needs: ClassVar[frozenset[str]] = frozenset()
    source: Path

    @property
    def name(self) -> str:
        return "scratch"

    def defines(self) -> dict[str, str]:
        return {}


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    (tmp_path / "kernel.cu").write_text('#include "near.h"\n#include <common/check.h>\n')
    (tmp_path / "near.h").write_text('  #  include "far.h"\n')
    (tmp_path / "far.h").write_text("// far\n")
    (tmp_path / "params.h").write_text("// parameters\n")
    return Scratch(source=tmp_path / "kernel.cu")


def test_includes_are_followed(scratch: Scratch) -> None:
    sources = read_sources(scratch.source)
    assert set(sources.texts) == {
        *("kernel.cu", "near.h", "far.h"),
        *("common/entry.cpp", "common/check.h", "common/entry.h", "common/fields.h"),
    }
    assert not sources.uses_cutlass


def test_includes_of_each_other_end(scratch: Scratch) -> None:
    scratch.source.with_name("far.h").write_text('#include "near.h"\n')
    assert "far.h" in read_sources(scratch.source).texts


def test_an_edit_is_noticed_though_size_and_time_are_as_before(scratch: Scratch) -> None:
    header = scratch.source.with_name("far.h")
    before, state = read_sources(scratch.source).texts["far.h"], header.stat()
    edited = header.with_name("edited")
    edited.write_text("// FAR\n")
    edited.replace(header)
    os.utime(header, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert header.stat().st_size == state.st_size
    assert (before, read_sources(scratch.source).texts["far.h"]) == ("// far\n", "// FAR\n")
    header.write_text("// fur\n")
    os.utime(header, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert read_sources(scratch.source).texts["far.h"] == "// fur\n"


def test_a_source_may_be_named_from_where_one_is(
    scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_sources(scratch.source)
    monkeypatch.chdir(scratch.source.parent)
    assert read_sources(Path("kernel.cu")) == expected


def test_a_missing_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.cu"):
        read_sources(tmp_path / "nowhere.cu")


@pytest.mark.parametrize("include", ["<cutlass/cutlass.h>", '"cute/tensor.hpp"'])
def test_cutlass_is_noticed_in_any_file(scratch: Scratch, include: str) -> None:
    assert "--expt-relaxed-constexpr" not in plan(scratch).flags
    scratch.source.with_name("far.h").write_text(f"#include {include}\n")
    assert read_sources(scratch.source).uses_cutlass
    assert "--expt-relaxed-constexpr" in plan(scratch).flags


@pytest.mark.parametrize("file", ["kernel.cu", "near.h", "far.h"])
def test_the_key_depends_on_every_file(scratch: Scratch, file: str) -> None:
    before = plan(scratch).key
    path = scratch.source.with_name(file)
    path.write_text(path.read_text() + "\n")
    assert plan(scratch).key != before


def test_the_key_does_not_depend_on_the_place(scratch: Scratch, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in ("kernel.cu", "near.h", "far.h", "params.h"):
        (moved / file).write_text((tmp_path / file).read_text())
    assert plan(Scratch(source=moved / "kernel.cu")).key == plan(scratch).key


def test_the_key_depends_on_macros_target_and_mode() -> None:
    variant = Probe()
    keys = [
        plan(variant).key,
        plan(replace(variant, waste=8)).key,
        plan(variant, target=target_named("80")).key,
        plan(variant, target=target_named("compute_80")).key,
        plan(variant, BuildMode(debug_print=True)).key,
        plan(variant, BuildMode(delay_site="probe_load")).key,
        plan(variant, BuildMode(delay_site="probe_store")).key,
    ]
    assert len(set(keys)) == len(keys)
    assert plan(variant).key == keys[0]


def test_every_library_is_compiled_for_its_gpu_without_asserts() -> None:
    probe = Probe()
    flags = plan(probe).flags
    assert "-DNDEBUG" in flags
    assert "arch=compute_90a,code=sm_90a" in flags
    assert "--use_fast_math" not in flags


def test_the_kernels_of_the_catalogue_include_the_parameters() -> None:
    quantize = plan(Quantize(kind="per_token", in_dtype="bf16", out_dtype="int8"))
    assert "gemm_w8a8/quantize/params.h" in quantize.sources.texts
    assert "common/fields.h" in quantize.sources.texts
    assert not quantize.sources.uses_cutlass
    tiled = plan(GemmTiled(dtype="int8", out_dtype="bf16", channels=128, tokens=128))
    assert tiled.sources.uses_cutlass


def test_a_mode_is_dropped_where_it_changes_nothing(scratch: Scratch) -> None:
    scratch.source.write_text('#include "common/debug.cuh"\n')
    mode = BuildMode(debug_print=True, delay_site="probe_load")
    assert plan(scratch, mode).mode == RELEASE
    assert plan(scratch, mode).key == plan(scratch).key
    assert plan(Probe(), mode).mode == mode


@pytest.mark.parametrize("use", ['OSTINATO_PRINT(true, "x");', "if constexpr (kDebugPrint) {"])
def test_debug_print_is_kept_where_it_is_used(scratch: Scratch, use: str) -> None:
    scratch.source.write_text(use)
    assert plan(scratch, BuildMode(debug_print=True)).mode.debug_print


def test_delay_sites_are_found() -> None:
    text = "OSTINATO_DELAY(one, warp == 1);\n  OSTINATO_DELAY( two_2 ,\n true);"
    assert delay_sites(text) == {"one", "two_2"}
    every = "\n".join(file.read_text() for file in (CSRC / "gemm_w8a8").rglob("*.*"))
    assert delay_sites(every) >= {"small_m_partial_store", "small_m_stage_release"}


def test_a_site_that_no_kernel_has_is_refused() -> None:
    BuildMode(delay_site="small_m_stage_release").check("site")
    RELEASE.check("site")
    with pytest.raises(ValueError, match=r"site: got 'nowhere', expected .*small_m_partial_load"):
        BuildMode(delay_site="nowhere").check("site")


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, RELEASE),
        ({"OSTINATO_DEBUG_PRINT": "0", "OSTINATO_DELAY_SITE": ""}, RELEASE),
        ({"OSTINATO_DEBUG_PRINT": "1"}, BuildMode(debug_print=True)),
        ({"OSTINATO_DELAY_SITE": "here"}, BuildMode(delay_site="here")),
    ],
)
def test_the_environment_chooses_the_mode(environment: dict[str, str], mode: BuildMode) -> None:
    assert BuildMode.from_environment(environment) == mode


@pytest.mark.parametrize(
    ("mode", "words", "flags"),
    [
        (RELEASE, "release", ""),
        (BuildMode(debug_print=True), "debug-print", " --debug-print"),
        (
            BuildMode(True, "here"),
            "debug-print, inject-delay here",
            " --debug-print --inject-delay here",
        ),
    ],
)
def test_a_mode_in_words_and_flags(mode: BuildMode, words: str, flags: str) -> None:
    assert str(mode) == words
    assert mode.flags == flags
