"""An update whose new values go to other memory: the bits are those of an update in place, and the old values stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity import _native

CHUNK, CUT = _native.CHUNK_NUMEL, 4096
STATES = ("weight", "residual", "exp_avg", "exp_avg_sq")


class Job:
    """The states of one job in memory, and a second memory of other bytes for each."""

    def __init__(
        self,
        path: Path,
        numel: int,
        moments: _native.MomentsName,
        tile: int,
        form: tuple[_native.DTypeName, _native.MasterName] = ("bf16", "split16"),
    ) -> None:
        self.numel, self.moments = numel, moments
        self.dtype, self.master = form
        self.states = tuple(name for name in STATES if name != "residual" or self.master in ("split16", "fp32"))
        self.engine = _native.IOEngine("threads", block_bytes=64 << 10, queue_depth=8)
        self.file = _native.File(str(path / "states"), create=True)
        self.file.preallocate(32 << 20)
        self.file.keep_checksums(32 << 20)
        nbytes = _native.UpdatePipeline.staging_tile_bytes(
            tile, weight_dtype=self.dtype, master=self.master, moments=moments
        )
        self._arena = _native.Arena(128 << 20, huge_pages=False)
        self._used = 0
        self.pipeline = _native.UpdatePipeline(
            self.engine, _native.ThreadPool(3), self.take(3 * nbytes), tile, nbytes, ahead_tiles_max=0
        )
        rng = np.random.default_rng(numel)
        values = {name: self._initial(name, rng) for name in self.states}
        self.sizes = {name: len(value) for name, value in values.items()}
        self.values = {name: self._filled(value) for name, value in values.items()}
        pages = {name: -(-len(value) // 4096) * 4096 for name, value in values.items()}
        self.others = {name: self._filled(np.full(nbytes, 0xA5, np.uint8)) for name, nbytes in pages.items()}
        self.grad = self._filled(rng.standard_normal(numel).astype(np.float32).view(np.uint8))

    def _initial(self, name: str, rng: np.random.Generator) -> np.ndarray:
        if name == "weight" and self.dtype != "fp32" and self.master != "split16":
            return np.zeros(2 * self.numel, np.uint8)  # of its master, or small numbers
        if name in ("weight", "residual") and self.master != "split16":
            return rng.standard_normal(self.numel).astype(np.float32).view(np.uint8)
        if name in ("weight", "residual"):
            weight, rest = np.empty(self.numel, np.uint16), np.empty(self.numel, np.int16)
            _native.encode_split16(rng.standard_normal(self.numel).astype(np.float32), weight, rest)
            return (weight if name == "weight" else rest).view(np.uint8)
        moment = np.abs(rng.standard_normal(self.numel)).astype(np.float32)
        data = np.zeros(_native.moment_bytes(self.moments, self.numel), np.uint8)
        _native.encode_moments(moment, self.moments, is_signed=name == "exp_avg", data=data)
        return data

    def take(self, nbytes: int) -> memoryview:
        view = self._arena.view(self._used, -(-nbytes // 4096) * 4096)
        self._used += len(view)
        return view

    def _filled(self, data: np.ndarray) -> memoryview:
        view = self.take(len(data))
        view[: len(data)] = data.tobytes()
        return view

    def submit(
        self, segments: list[_native.Segment], *, elsewhere: tuple[str, ...], write: bool = False
    ) -> _native.UpdateFuture:
        file = self.file if write else None
        streams = {
            name: _native.StateStream(
                memory=self.others[name] if name in elsewhere else self.values[name],
                source=self.values[name] if name in elsewhere else None,
                file=file,
                offset=index * (8 << 20),
            )
            for index, name in enumerate(STATES)
            if name in self.states
        }
        return self.pipeline.submit(
            numel=self.numel,
            weight_dtype=self.dtype,
            master=self.master,
            moments=self.moments,
            grad_dtype="fp32",
            segments=segments,
            whole=bool(elsewhere),
            grad=self.grad,
            **streams,
        )

    def written(self, name: str) -> bytes:
        view = self.take(self.sizes[name])
        assert self.engine.read(self.file, STATES.index(name) * (8 << 20), view).wait(60)
        return bytes(view[: self.sizes[name]])

    def bytes_of(self, memory: dict[str, memoryview]) -> dict[str, bytes]:
        return {name: bytes(view[: self.sizes[name]]) for name, view in memory.items()}

    def close(self) -> None:
        self.pipeline.close()
        self.engine.close()
        self.file.close()


def segment(begin: int, end: int) -> _native.Segment:
    return _native.Segment(begin, end, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=2)


SIZES = [  # with elements in no segment, and whole tiles of them
    pytest.param("fp32", 5 * CUT + 300, CUT, [(0, 700), (800, CUT + 16), (4 * CUT, 5 * CUT + 300)], id="fp32"),
    pytest.param("bf16", 5 * CUT + 300, 2 * CUT, [(16, 700), (4 * CUT, 5 * CUT)], id="bf16"),
    pytest.param("int8", 2 * CHUNK + 1500, CHUNK, [(0, 512), (2 * CHUNK, 2 * CHUNK + 1500)], id="int8"),
    pytest.param("int8", 3 * CHUNK, 2 * CHUNK, [(256, CHUNK + 256), (3 * CHUNK - 256, 3 * CHUNK)], id="int8-two"),
    pytest.param("int8", 1000, CUT, [(0, 256)], id="int8-one-tile"),
]
ELSEWHERE = [STATES, ("residual", "exp_avg", "exp_avg_sq"), ("weight",), ("exp_avg",)]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("elsewhere", ELSEWHERE, ids="+".join)
@pytest.mark.parametrize(("moments", "numel", "tile", "parts"), SIZES)
def test_new_values_go_elsewhere_and_the_old_ones_stay(
    moments: _native.MomentsName,
    numel: int,
    tile: int,
    parts: list[tuple[int, int]],
    elsewhere: tuple[str, ...],
    write: bool,
    tmp_path: Path,
) -> None:
    """Elements in no segment go there, too, with zeros up to the next page; the new values are written to the file."""
    segments = [segment(*part) for part in parts]
    (tmp_path / "in_place").mkdir()
    in_place = Job(tmp_path / "in_place", numel, moments, tile)
    assert in_place.submit(segments, elsewhere=()).wait(60)
    expected = in_place.bytes_of(in_place.values)
    in_place.close()
    job = Job(tmp_path, numel, moments, tile)
    before = job.bytes_of(job.values)
    future = job.submit(segments, elsewhere=elsewhere, write=write)
    assert future.wait(60)
    assert future.failure() is None
    old, new = job.bytes_of(job.values), job.bytes_of(job.others)
    for name in STATES:
        assert (new if name in elsewhere else old)[name] == expected[name], name
        assert expected[name] != before[name], name
        if name in elsewhere:
            assert old[name] == before[name], name
            assert not any(job.others[name][job.sizes[name] :]), name
        if write:
            assert job.written(name) == expected[name], name
    job.close()


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "form", [("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "none"), ("fp32", "weight")], ids="-".join
)
def test_every_form_of_weights_goes_elsewhere(form: Any, moments: _native.MomentsName, tmp_path: Path) -> None:
    parts = [segment(0, 700), segment(784, CUT + 16), segment(2 * CUT, 3 * CUT + 100)]
    (tmp_path / "in_place").mkdir()
    in_place = Job(tmp_path / "in_place", 3 * CUT + 100, moments, CUT, form)
    job = Job(tmp_path, 3 * CUT + 100, moments, CUT, form)
    before = job.bytes_of(job.values)
    for each, elsewhere in ((in_place, ()), (job, job.states)):
        future = each.submit(parts, elsewhere=elsewhere)
        assert future.wait(60)
        assert future.failure() is None
    assert job.bytes_of(job.others) == in_place.bytes_of(in_place.values) != before
    assert job.bytes_of(job.values) == before
    for each in (in_place, job):
        each.close()


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_a_moment_that_no_rule_uses_goes_along(moments: _native.MomentsName, tmp_path: Path) -> None:
    job = Job(tmp_path, 2 * CUT + 100, moments, CHUNK)
    before = job.bytes_of(job.values)
    momentum = _native.Segment(0, CUT, rule="sgd", lr=1e-2, beta1=0.9, step=2)
    assert job.submit([momentum], elsewhere=STATES).wait(60)
    new = job.bytes_of(job.others)
    assert new["exp_avg_sq"] == before["exp_avg_sq"]
    assert new["exp_avg"] != before["exp_avg"]
    job.close()


def test_a_canceled_update_leaves_the_old_values(tmp_path: Path) -> None:
    job = Job(tmp_path, 64 * CUT, "fp32", CUT)
    before = job.bytes_of(job.values)
    futures = [job.submit([segment(0, job.numel)], elsewhere=STATES) for _ in range(8)]
    for future in futures:
        job.pipeline.cancel(future)
    for future in futures:
        assert future.wait(60)
    assert job.bytes_of(job.values) == before
    job.close()


def test_gradients_have_no_source_and_a_source_overlaps_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, CUT, "fp32", CUT)
    streams = {name: _native.StateStream(memory=job.values[name]) for name in STATES}
    streams["residual"] = _native.StateStream(memory=job.others["residual"], source=job.values["exp_avg"])

    def submit(grad: _native.StateStream) -> None:
        job.pipeline.submit(
            numel=CUT,
            weight_dtype="bf16",
            master="split16",
            grad_dtype="fp32",
            segments=[segment(0, CUT)],
            grad=grad,
            **streams,
        )

    with pytest.raises(ValueError, match="the residual's source"):
        submit(_native.StateStream(memory=job.grad))
    streams["residual"] = _native.StateStream(memory=job.others["residual"], source=job.values["residual"][: CUT // 2])
    with pytest.raises(ValueError, match="residual"):
        submit(_native.StateStream(memory=job.grad))
    streams["residual"] = _native.StateStream(memory=job.values["residual"])
    with pytest.raises(ValueError, match="gradients are read from memory only"):
        submit(_native.StateStream(memory=job.grad, source=job.others["exp_avg"]))
    job.close()
