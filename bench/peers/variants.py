"""Settings of DeepSpeed that are worth trying, and the search for the best settings; DeepSpeed's defaults are best
neither in time nor in memory.

`aio` was also tried with queue_depth 32 and intra_op_parallelism 2 and 4; the differences were within the noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from peers.process import Worker, WorkerError
from peers.workload import Workload

_BUFFER_COUNTS_TRIED = 16


@dataclass(frozen=True)
class Variant:
    """One configuration of DeepSpeed.

    Attributes:
        name: for the command line and the tables.
        pipeline: pipeline_read and pipeline_write.
        smallest_buffer_count: start of the search for the smallest count that runs; one less is known to fail an
            assert.
        sub_groups: sub_group_size is the model's size divided by this; 1 keeps the default 1e9, with nothing to
            pipeline.
        small_buckets: use the bucket sizes that the transformers integration computes for "auto", instead of 5e8 and
            5e7.
    """

    name: str
    pipeline: bool
    smallest_buffer_count: int
    sub_groups: int = 1
    small_buckets: bool = False

    def options(self, workload: Workload, buffer_count: int) -> dict[str, Any]:
        """Return the options of peers.worker_deepspeed."""
        zero: dict[str, Any] = {}
        if self.sub_groups > 1:
            zero["sub_group_size"] = -(-workload.numel // self.sub_groups)
        if self.small_buckets:
            zero |= {
                "reduce_bucket_size": workload.hidden**2,
                "stage3_prefetch_bucket_size": int(0.9 * workload.hidden**2),
                "stage3_param_persistence_threshold": 10 * workload.hidden,
            }
        return {
            "offload_param": "cpu",
            "buffer_count": buffer_count,
            "pipeline_read": self.pipeline,
            "pipeline_write": self.pipeline,
            "zero": zero,
        }


VARIANTS = (
    Variant("serial", pipeline=False, smallest_buffer_count=4),
    Variant("pipelined", pipeline=True, smallest_buffer_count=4),
    Variant("serial-quarters", pipeline=False, smallest_buffer_count=4, sub_groups=4),
    Variant("pipelined-quarters", pipeline=True, smallest_buffer_count=12, sub_groups=4),
    Variant("pipelined-quarters-small", pipeline=True, smallest_buffer_count=12, sub_groups=4, small_buckets=True),
    Variant("pipelined-eighths-small", pipeline=True, smallest_buffer_count=12, sub_groups=8, small_buckets=True),
)


@dataclass(frozen=True)
class Trial:
    """Result of a variant in the probe, or the reason why the variant did not run (in this case `options` is None).

    Attributes:
        too_small: buffer counts that failed, each with its error.
        seconds: median seconds of the steps.
        peak_rss_bytes: peak RSS of the measured steps.
    """

    variant: str
    options: dict[str, Any] | None
    too_small: dict[int, str]
    seconds: float = float("inf")
    peak_rss_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


MakeWorker = Callable[[str, dict[str, Any]], Worker]


def try_variant(
    variant: Variant, workload: Workload, make_worker: MakeWorker, first_count: int | None = None, steps: int = 2
) -> Trial:
    """Find the smallest buffer count with which the variant runs, and measure the variant in `steps` turns with this
    count."""
    start = variant.smallest_buffer_count if first_count is None else first_count
    too_small: dict[int, str] = {}
    for count in range(start, start + _BUFFER_COUNTS_TRIED):
        options = variant.options(workload, count)
        worker = make_worker(f"deepspeed-{variant.name}-{count}", options)
        try:
            worker.start()
            worker.wait_ready()
            measured = [worker.step() for _ in range(1 + steps)][1:]
        except WorkerError as error:
            too_small[count] = describe(error)
            if "AssertionError" in too_small[count]:
                continue
            break  # a larger pool can help only against this error
        finally:
            worker.stop()
        seconds = statistics.median(step["seconds"] for step in measured)
        return Trial(variant.name, options, too_small, seconds, max(step["peak_rss_bytes"] for step in measured))
    return Trial(variant.name, None, too_small)


def parse_variant(text: str, workload: Workload) -> dict[str, Any]:
    """Return the options of `NAME` or `NAME:BUFFER_COUNT`.

    Raises:
        ValueError: there is no such variant.
    """
    name, _, count = text.partition(":")
    for variant in VARIANTS:
        if variant.name == name:
            return variant.options(workload, int(count) if count else variant.smallest_buffer_count)
    raise ValueError(f"no DeepSpeed variant '{name}'; there are {', '.join(each.name for each in VARIANTS)}")


def params_on_nvme(workload: Workload) -> dict[str, Any]:
    """Return settings, found by hand, with which DeepSpeed runs with parameters on NVMe and really removes them from
    memory.

    Two changes are needed in addition to the fastest optimizer settings. Prefetching from NVMe must be off, because it
    would fetch a parameter that already has a buffer. The limit on live parameters must be small, because otherwise
    each parameter needs a buffer.
    """
    block = workload.numel // workload.layers
    largest = workload.hidden * max(workload.vocabulary, workload.intermediate)
    options = Variant("", True, 12, sub_groups=4).options(workload, 12)
    options["zero"] |= {
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": 0,
    }
    return options | {"offload_param": "nvme", "param_buffers": {"buffer_count": 24, "buffer_size": largest + 4096}}


def params_on_nvme_attempts(workload: Workload) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield settings from DeepSpeed's defaults to the settings of `params_on_nvme`, each with one more change."""
    tuned = params_on_nvme(workload)
    default = Variant("", False, 4).options(workload, 4) | {"offload_param": "nvme"}
    buffers = {"buffer_size": tuned["param_buffers"]["buffer_size"]}
    all_buffers = buffers | {"buffer_count": 10 * workload.layers}
    yield "defaults (5 buffers of 1e8 elements)", default
    yield "40 buffers as large as the largest parameter", default | {"param_buffers": buffers | {"buffer_count": 40}}
    yield "a buffer for every parameter", default | {"param_buffers": all_buffers}
    no_prefetch = {"zero": {"stage3_prefetch_bucket_size": 0}}
    yield "a buffer for every parameter, prefetching off", default | {"param_buffers": all_buffers} | no_prefetch
    yield "24 buffers, prefetching off, few live parameters, pipelined", tuned


def describe(error: WorkerError) -> str:
    """Return the error's text, or the line of the assert if an assert without text failed."""
    text = str(error).strip()
    if not text.endswith(":"):
        return text
    source = [line.strip() for line in error.cause.splitlines() if line.strip().startswith("assert")]
    return f"{text} {source[-1]}" if source else text
