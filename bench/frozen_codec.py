#!/usr/bin/env python3
"""Encoding of weights to 4 and 8 bits and decoding to bf16 on the CPU: infinity, its peers and a plain copy.

    python bench/frozen_codec.py --json build/frozen-codec.json        # 64 Mi parameters, one thread and two

| contender | what it is |
|---|---|
| copy | a copy that writes as much as a decoder: 2 bytes for each parameter |
| infinity | `_native.encode_weights`, `nest_scales` and `decode_weights` |
| bitsandbytes | `quantize_4bit` and `dequantize_4bit`, NF4, blocks of 64; nested: `compress_statistics` |
| torchao | `to_nf4` and `get_original_weight`, blocks of 64, always nested |
| torch | FP8: e4m3 to fp32, times the scales of blocks of 128 × 128, to bf16 |
| transformers | MXFP4 of gpt-oss: `convert_moe_packed_tensors`, which transposes matrices of 1024 × 1024 |

Peers that are not installed are left out. To install them, run `pip install bitsandbytes==0.50.2 torchao` in the
environment that runs this script; or run `bench/peers/setup.sh`, install infinity in .venv-peers and use
`.venv-peers/bin/python`. A peer allocates the memory for its result in each call. As in normal use, the allocation is
included in the peer's time. The column `per processor` divides by the processor time of all threads, which other
processes on the machine change less. Every round runs all contenders, in an order that rotates. The column `/ copy` is
the median over the rounds of a rate divided by the copy's rate in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.report import format_table, machine_facts, write_result

_CHECKOUT = Path(__file__).resolve().parent.parent
_COPY = "copy of as many bytes"
Rows = dict[str, Callable[[], object]]


def own_rows(values: Any, out: Any, threads: int) -> Rows:
    """Return the rows of infinity and of the copy."""
    import torch

    from infinity import _native

    pool, numel = _native.ThreadPool(threads), values.numel()
    source, target = values.view(torch.uint8).numpy(), out.view(torch.uint8).numpy()
    rows: Rows = {_COPY: lambda: out.copy_(values)}
    parts: dict[str, dict[str, Any]] = {}

    def encode(codec: str) -> None:
        plain = "nf4_fp32" if codec == "nf4" else codec
        _native.encode_weights(source, "bf16", plain, parts[plain]["codes"], parts[plain]["scales"], pool)
        if codec == "nf4":
            scales = torch.from_numpy(parts[plain]["scales"]).view(torch.float32)
            offset, to = float(scales.mean()), parts["nf4"]
            torch.from_numpy(to["offset"]).view(torch.float32)[0] = offset
            _native.nest_scales(scales.numpy(), offset, to["scales"], to["nested_scales"])

    for codec in ("nf4_fp32", "nf4", "int8"):
        data = torch.zeros(_native.encoded_weight_bytes(codec, numel), dtype=torch.uint8).numpy()
        parts[codec] = {name: data[at : at + n] for name, (at, n) in _native.weight_parts(codec, numel).items()}
        encode(codec)
        rows[f"decode {codec}: infinity"] = lambda codec=codec, data=data: _native.decode_weights(
            data, codec, numel, 0, target, "bf16", pool
        )
        rows[f"encode {codec}: infinity"] = lambda codec=codec: encode(codec)
    parts["nf4"]["codes"][:] = parts["nf4_fp32"]["codes"]
    return rows | fp8_rows(values, target, pool) | packed_rows(values, target, pool)


def fp8_rows(values: Any, target: Any, pool: Any) -> Rows:
    """Return the rows of block FP8: infinity and torch."""
    import torch

    from infinity import _native

    codec, columns, numel = "fp8_block:128x128:fp32", 4096, values.numel()
    data = torch.zeros(_native.encoded_weight_bytes(codec, numel, columns), dtype=torch.uint8)
    begin, nbytes = _native.weight_parts(codec, numel, columns)["scales"]
    codes, scales = data[:numel].view(torch.float8_e4m3fn), data[begin : begin + nbytes].view(torch.float32)
    codes.copy_(values.mul(1000))
    scales.fill_(1e-3)

    def of_torch() -> object:
        blocks = codes.float().view(-1, 128, columns // 128, 128)
        return (blocks * scales.view(len(blocks), 1, -1, 1)).bfloat16()

    encoded = data.numpy()
    return {
        "decode fp8_block: infinity": lambda: _native.decode_weights(
            encoded, codec, numel, columns, target, "bf16", pool
        ),
        "decode fp8_block: torch": of_torch,
    }


def packed_rows(values: Any, target: Any, pool: Any) -> Rows:
    """Return the rows of MXFP4, NVFP4 and groups of integers: infinity, and transformers for the experts of gpt-oss."""
    import torch

    from infinity import _native

    rows: Rows = {}
    side, numel = 1024, values.numel()
    codes = torch.randint(0, 256, (numel // 2,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    names = {f"mxfp4:{side}": "mxfp4 of gpt-oss", "nvfp4:factor": "nvfp4", "int4_group:128:bf16": "int4_group"}
    for codec, name in {"mxfp4": "mxfp4", **names}.items():
        data = torch.full((_native.encoded_weight_bytes(codec, numel, side),), 100, dtype=torch.uint8)
        parts = _native.weight_parts(codec, numel, side)
        data[: numel // 2] = codes
        if "nested_scales" in parts:
            begin, nbytes = parts["nested_scales"]
            data[begin : begin + nbytes].view(torch.float32).fill_(1e-3)
        rows[f"decode {name}: infinity"] = lambda codec=codec, data=data.numpy(): _native.decode_weights(  # noqa: B008
            data, codec, numel, side, target, "bf16", pool
        )
    try:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    except ImportError:
        return rows
    blocks = codes.view(-1, side, side // 32, 16)
    scales = torch.full(blocks.shape[:-1], 100, dtype=torch.uint8)
    return rows | {"decode mxfp4 of gpt-oss: transformers": lambda: convert_moe_packed_tensors(blocks, scales)}


def rows_of_bitsandbytes(values: Any) -> Rows:
    from bitsandbytes import functional

    rows: Rows = {}
    for codec, nested in (("nf4_fp32", False), ("nf4", True)):
        options = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": nested}
        packed, state = functional.quantize_4bit(values, **options)
        rows[f"decode {codec}: bitsandbytes"] = lambda packed=packed, state=state: functional.dequantize_4bit(
            packed, state
        )
        rows[f"encode {codec}: bitsandbytes"] = lambda options=options: functional.quantize_4bit(values, **options)
    return rows


def rows_of_torchao(values: Any) -> Rows:
    try:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
    except ImportError:
        from torchao.dtypes.nf4tensor import to_nf4  # older than 0.18

    square = values.view(4096, -1)
    kept = to_nf4(square, 64, 256)
    return {
        "decode nf4: torchao": lambda: kept.get_original_weight(),
        "encode nf4: torchao": lambda: to_nf4(square, 64, 256),
    }


def measure(numel: int, threads: int, rounds: int) -> dict[str, Any]:
    """Time all rows. Must be called in a separate process, whose OpenMP has `threads` threads.

    Returns:
        `seconds` and `processor_seconds` of each round, by row; and `missing`: by peer, the reason why it has no rows.
    """
    import torch

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1 << 20, generator=generator).mul_(0.02).bfloat16().repeat(numel >> 20)
    rows, missing = own_rows(values, torch.zeros_like(values), threads), {}
    for peer, make in {"bitsandbytes": rows_of_bitsandbytes, "torchao": rows_of_torchao}.items():
        try:
            rows |= make(values)
        except ImportError as error:
            missing[peer] = str(error)
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    processor: dict[str, list[float]] = {row: [] for row in rows}
    for row in rows.values():
        row()
    for number in range(rounds):
        for row in list(rows) if number % 2 == 0 else list(rows)[::-1]:
            began, used = time.perf_counter(), time.process_time()
            rows[row]()
            seconds[row].append(time.perf_counter() - began)
            processor[row].append(time.process_time() - used)
    return {"seconds": seconds, "processor_seconds": processor, "missing": missing}


def summarise(
    numel: int, seconds: dict[str, list[float]], processor: dict[str, list[float]]
) -> dict[str, dict[str, float]]:
    """Return for each row the parameters per second, the same per second of one processor, and the first rate as a
    share of the copy's rate."""
    return {
        row: {
            "parameters_per_s": numel / statistics.median(each),
            "parameters_per_processor_s": numel / statistics.median(processor[row]),
            "to_copy": statistics.median(copy / own for copy, own in zip(seconds[_COPY], each, strict=True)),
        }
        for row, each in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--numel", type=int, default=64 << 20, help="parameters, a multiple of 1 Mi (default 64 Mi)")
    add("--threads", type=int, nargs="+", default=[1, 2])
    add("--rounds", type=int, default=9)
    add("--json", type=Path, help="write all measurements to this file")
    add("--turn", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        print(json.dumps(measure(args.numel, args.turn, args.rounds)))
        return
    from infinity import _native

    result: dict[str, Any] = {"machine": machine_facts(_CHECKOUT), "isa": _native.select_isa(), "numel": args.numel}
    for threads in args.threads:
        command = [sys.executable, __file__, "--numel", str(args.numel), "--rounds", str(args.rounds)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        run = subprocess.run(
            [*command, "--turn", str(threads)], check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        found = json.loads(run.stdout.splitlines()[-1])
        summary = summarise(args.numel, found["seconds"], found["processor_seconds"])
        print(f"\n{threads} thread(s), {result['isa']}")
        rows = [
            (
                row,
                f"{each['parameters_per_s'] / 1e9:.3f}",
                f"{each['parameters_per_processor_s'] / 1e9:.3f}",
                f"{each['to_copy']:.2f}",
            )
            for row, each in summary.items()
        ]
        print(format_table(("", "Gparam/s", "per processor", "/ copy"), [rows[0], *sorted(rows[1:])]))
        for peer, reason in found["missing"].items():
            print(f"{peer} is missing: {reason}")
        result[f"threads_{threads}"] = {**found, "summary": summary}
    if args.json:
        write_result(args.json, result, {_CHECKOUT: "<checkout>"})


if __name__ == "__main__":
    main()
