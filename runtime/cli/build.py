"""`build`: compiles kernels ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..jit.cache import Entry
from ..jit.compiler import Plan, build, find, library_folders, plan
from ..jit.mode import BuildMode
from ..jit.registry import select
from ..jit.targets import DEFAULT, TARGETS, Target, local_target, target_named
from ..jit.variant import FLOAT_DTYPES, OPERAND_DTYPES, Variant
from .command import Command, Parser, UserError, find_model, user_errors
from .model_flags import add_batch_invariant_flag, add_kv_cache_flags

if TYPE_CHECKING:  # with torch
    from ..models import ScaleKind


def _parser() -> Parser:
    parser = Parser(
        prog="ostinato build",
        usage="python -m ostinato build (--all | --only NAME ... | --for-model DIR | "
        "--dtypes D ...) [options]",
        description="Compile kernels into the cache; what is there already is left alone. "
        "Selections other than --all combine. Needs nvcc: `pip install 'ostinato[cuda]'`.",
    )
    chosen = parser.add_argument_group("which kernels")
    chosen.add_argument("--all", action="store_true", help="every kernel there is")
    chosen.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="these families, such as embed, or variants (as `python -m ostinato kernels` lists "
        "them, or an error names them)",
    )
    chosen.add_argument(
        "--for-model", metavar="DIR", help="what the model of this checkpoint may launch"
    )
    chosen.add_argument(
        "--lm-head",
        choices=("int8", "fp8"),
        help="with --for-model: as load_model(lm_head_dtype=...), a quantised output projection",
    )
    chosen.add_argument(
        *("--tensor-parallel-size", "-tp", "--tp"),
        dest="ranks",
        type=int,
        default=1,
        metavar="N",
        help="with --for-model: what the model's share of each of N GPUs may launch (default: 1)",
    )
    add_batch_invariant_flag(chosen, help="with --for-model: as load_model(batch_invariant=False)")
    add_kv_cache_flags(chosen, when="with --for-model: ")
    chosen.add_argument(
        "--dtypes",
        nargs="+",
        default=[],
        choices=(*OPERAND_DTYPES, *FLOAT_DTYPES),
        metavar="D",
        help=f"only kernels of these: {', '.join(OPERAND_DTYPES)} for weights, "
        f"{', '.join(FLOAT_DTYPES)} for activations",
    )
    chosen.add_argument(
        "--arch",
        nargs="+",
        default=[],
        metavar="A",
        help="what there is of the selection for each of these GPUs: "
        f"{', '.join(target.name for target in TARGETS)}, or compute_80 and so on for PTX "
        f"(default: this machine's GPU, else {DEFAULT.name})",
    )
    mode = parser.add_argument_group("builds for debugging (see docs/workshop.md)")
    mode.add_argument("--debug-print", action="store_true", help="compile device printing in")
    mode.add_argument(
        "--inject-delay", metavar="SITE", help="hold one warp back before this hand-over"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="compilers at once (default: as cores and memory allow)",
    )
    return parser


def _main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs: got {args.jobs}, expected at least 1")
    if not (args.all or args.only or args.for_model or args.dtypes):
        raise UserError("got no selection, expected --all, --only, --for-model or --dtypes")
    for flag in ("only", "for_model", "dtypes"):
        if args.all and getattr(args, flag):
            raise UserError(f"--all: got --{flag.replace('_', '-')} beside it, expected it alone")
    if args.ranks < 1:
        raise UserError(f"--tensor-parallel-size: got {args.ranks}, expected at least 1")
    of_model = (
        args.lm_head or not args.batch_invariant,
        args.kv_cache_dtype != "auto" or args.kv_scales is not None,
        args.ranks > 1,
    )
    if args.for_model is None and any(of_model):
        raise UserError(
            "--lm-head, --no-batch-invariant, --tensor-parallel-size, --kv-cache-dtype, "
            "--kv-scales go with --for-model"
        )
    if args.for_model is not None:
        args.for_model = find_model("--for-model", args.for_model, weights=False)

    from ..ops.catalogue import CATALOGUE  # with torch

    mode = BuildMode(args.debug_print, args.inject_delay)
    with user_errors():
        mode.check("--inject-delay")
        needed: set[Variant] = set()
        if args.for_model:
            needed = _model_kernels(
                Path(args.for_model),
                lm_head=args.lm_head,
                batch_invariant=args.batch_invariant,
                kv_cache_dtype=args.kv_cache_dtype,
                kv_scales=args.kv_scales,
                ranks=args.ranks,
            )
        # A model may need what is otherwise compiled when it is first used.
        unlisted = sorted(needed - set(CATALOGUE), key=lambda variant: variant.name)
        chosen = select((*CATALOGUE, *unlisted), only=args.only, dtypes=args.dtypes)
        if args.for_model:
            chosen = [variant for variant in chosen if variant in needed]
        plans = [
            plan(variant, mode, target)
            for target in _targets(args.arch)
            for variant in chosen
            if variant.needs <= target.features
        ]
        if not plans:
            raise ValueError(f"--arch: got {' '.join(args.arch)}, which runs none of these kernels")
    build_plans(plans, args.jobs)
    return 0


def _targets(names: Sequence[str]) -> list[Target]:
    return list(dict.fromkeys(map(target_named, names))) if names else [local_target()]


def build_plans(plans: Sequence[Plan], jobs: int | None = None) -> None:
    """Compile those of the kernels that are missing and say which.

    Arguments and errors are those of `compiler.build`.
    """
    missing = [item for item in plans if find(item) is None]
    print(
        f"{len(plans)} kernels, {len(plans) - len(missing)} of them compiled already, "
        f"in {' and '.join(map(str, library_folders()))}",
        flush=True,
    )
    width = len(str(len(missing)))
    count = 0

    def report(entry: Entry) -> None:
        nonlocal count
        count += 1
        usage = entry.usage
        found = f"{usage.registers} registers, {usage.spills} bytes spilled"
        print(
            f"[{count:{width}}/{len(missing)}] {entry.variant} ({entry.target}, {entry.mode}): "
            + "; ".join([f"{entry.seconds:.0f} s, {found}", *usage.warnings]),
            flush=True,
        )

    if missing:
        build(missing, jobs=jobs, report=report)


def _model_kernels(
    folder: Path,
    *,
    lm_head: str | None,
    batch_invariant: bool,
    kv_cache_dtype: str = "auto",
    kv_scales: ScaleKind | None = None,
    ranks: int = 1,
) -> set[Variant]:
    """Return what the model of a checkpoint may launch, for any number of tokens.

    Args:
        folder: of the checkpoint.
        lm_head: "int8" or "fp8" for an output projection that is quantised when it is loaded.
        batch_invariant: as of `load_model`.
        kv_cache_dtype: as of `Engine`.
        kv_scales: likewise.
        ranks: how many divide the model, each of which compiles the same.
    """
    import torch

    from ..bench.weights import dtype_named
    from ..checkpoint import load_config
    from ..checkpoint.layout import check_shares, checked_layout, with_plain_routers
    from ..checkpoint.quantization import load_quantization
    from ..checkpoint.storage.dense import DENSE
    from ..models import KVScales, family_of, kv_format
    from ..models.layers import dense_kernels
    from ..models.required_kernels import collective_kernels
    from ..ops.common.device import runs
    from ..ops.linear.gemm_variants import GemmTiled
    from ..ops.linear.precompile import gated_kernels, layer_kernels

    config = load_config(folder)
    quantization = load_quantization(folder, text_tower=config.text_tower)
    scheme_of = quantization.scheme_of
    layout = checked_layout(config, scheme_of)
    scheme_of = with_plain_routers(scheme_of, layout)
    shares = [layout]
    if ranks > 1:
        # The last may have fewer rows of the vocabulary.
        shares = [layout.shard(rank, ranks) for rank in (0, ranks - 1)]
        for share in shares:
            check_shares(share, scheme_of)
        config = config.of_rank(ranks)
    # What was tuned on this machine counts, if it is one that the kernels run on.
    here = torch.cuda.is_available() and runs(GemmTiled, torch.cuda.current_device())
    device = torch.device("cuda") if here else None
    known = family_of(config)
    of_checkpoint, kv_cache = None, quantization.kv_cache
    if kv_cache is not None:
        # Kernels do not depend on the factors, nor on whether the file has some.
        factors = torch.ones(config.num_layers)
        of_checkpoint = KVScales(kv_cache.dtype, factors, factors)
    cache_format = kv_format(config, of_checkpoint, kv_cache_dtype, kv_scales)
    needed: set[Variant] = set(
        known.kernels(config, cache_format=cache_format, batch_invariant=batch_invariant)
    )
    quantizes_head = lm_head is not None and scheme_of("lm_head") == DENSE
    for share in shares:
        for part in share.linears():
            is_head = part is share.lm_head
            for scheme, run in () if is_head and quantizes_head else part.runs(scheme_of):
                needed.update(
                    scheme.kernels(
                        *(run.kind, run.shape, config.dtype),
                        batch_invariant=batch_invariant,
                        device=device,
                        out_dtype=torch.float32 if is_head or part.chooses else None,
                    )
                )
    for experts in layout.experts():
        scheme = experts.scheme(scheme_of)
        needed.update(scheme.experts_kernels(config.dtype, out_dtype=config.dtype))
    for share in shares:
        rows, columns = share.embedding.shape
        head = (config.norm.input_kind, (rows, columns))
        if quantizes_head:
            assert lm_head is not None
            needed.update(
                layer_kernels(
                    *(*head, dtype_named(lm_head), config.dtype),
                    out_dtype=torch.float32,
                    batch_invariant=batch_invariant,
                    device=device,
                )
            )
        elif share.lm_head is None:
            needed.update(
                dense_kernels(*head, config.dtype, out_dtype=torch.float32, device=device)
            )
    if ranks == 1:
        needed.update(gated_kernels(config.activation, needed))
    else:
        needed.update(collective_kernels(config.dtype, ranks, needed))
    return needed


COMMAND = Command("compile kernels ahead of time", _main)
