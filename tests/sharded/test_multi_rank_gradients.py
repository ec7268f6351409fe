"""Gradients over ranks: whatever comes where and when, each owner has the sum in the order of passes and ranks, and all
ranks know the same of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch

from infinity import _native
from infinity.errors import PeerError, SwapIOError
from infinity.io.arena import PinnedArena
from infinity.ranks.operations import AllToAll, CollectiveOperation
from infinity.sharded.multi_rank_gradients import PARTIAL_NUMEL, MultiRankGradients
from infinity.sharded.outbox import GradientOutbox, trained
from infinity.sizes import round_up
from infinity.state.shard import RankPartition, Shard
from infinity.state.unit import ELEMENT_ALIGNMENT, FlatParameterGroup, ParameterPlace, ParameterSpec, Unit
from infinity.units.gradients import GroupGradients, UnitGradients
from tests import sampling

SIZES = ((100_000, 70_000, 50_000), (300,), (131_072, 65_536))
"""Elements of the parameters of each unit: slices that cut one, that have several, and that are empty."""
FROZEN = 1
Result = TypeVar("Result")


def unit_of(index: int, dtype: torch.dtype) -> Unit:
    specs, offset = [], 0
    for number, numel in enumerate(SIZES[index]):
        specs.append(ParameterSpec(f"{index}.{number}", torch.Size([numel]), numel, offset, offset))
        offset += round_up(numel, ELEMENT_ALIGNMENT)
    nbytes = round_up(offset * dtype.itemsize, 4096)
    group = FlatParameterGroup(dtype, index != FROZEN, "fp32", tuple(specs), offset, 0, nbytes)
    return Unit(index, str(index), (group,), nbytes, False)


class World:
    """The collectives of ranks that are threads: each is done once all ranks have asked for it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._all = threading.Condition()
        self._asked: list[dict[int, Any]] = []
        self._next = [0] * count

    def join(self, rank: int, asked: Any) -> Callable[[], dict[int, Any]]:
        """Enter the next operation of `rank`. Return a function that waits for the other ranks and returns the requests
        of all."""
        with self._all:
            number = self._next[rank]
            self._next[rank] += 1
            if number == len(self._asked):
                self._asked.append({})
            found = self._asked[number]
            found[rank] = asked
            if len(found) == self.count and isinstance(asked, AllToAll):
                exchange(found)
            self._all.notify_all()

        def wait() -> dict[int, Any]:
            with self._all:
                assert self._all.wait_for(lambda: len(found) == self.count, 20), "a rank did not come"
            return found

        return wait


def exchange(found: dict[int, AllToAll]) -> None:
    for to, receiver in found.items():
        parts = []
        for sender in (found[rank] for rank in sorted(found)):
            begin = sum(sender.send_splits[:to])
            parts.append(sender.send[begin : begin + sender.send_splits[to]])
        assert [part.numel() for part in parts] == list(receiver.receive_splits)
        receiver.receive.copy_(torch.cat(parts))


@dataclass
class Ticket:
    wait: Callable[[], Any]
    failure: PeerError | None = None
    taken: int = 0

    def done(self) -> bool:
        return self.failure is None

    def result(self) -> None:
        if self.failure is not None:
            self.taken += 1
            raise self.failure
        self.wait()


@dataclass
class Collectives:
    """Fake collective queue of a rank. Attributes: failure: error of the operations that are submitted from now on."""

    world: World
    rank: int
    failure: PeerError | None = None
    tickets: list[Ticket] = field(default_factory=list)

    def submit(self, operation: CollectiveOperation) -> Ticket:
        for each in operation.after:
            each()
        self.tickets.append(Ticket(self.world.join(self.rank, operation.collective), self.failure))
        return self.tickets[-1]

    def all_gather_at(self, name: str, payload: bytes) -> list[bytes]:
        found = self.world.join(self.rank, payload)()
        return [found[rank] for rank in sorted(found)]


POOL = _native.ThreadPool(1)


def gradients_of(unit: Unit, memory: dict[int, memoryview], whole: Unit | None = None) -> UnitGradients:
    """Args: memory: is given what they are in, by unit. whole: what `unit` is a slice of."""
    groups = {}
    for index, group in enumerate(unit.groups):
        if group.trainable and group.numel:
            nbytes = round_up(4 * group.numel, 4096)
            lease = PinnedArena(nbytes).lease(nbytes, "gradients")
            memory[unit.index] = lease.view()
            groups[index] = GroupGradients(unit, group, lease, None, None, None, POOL)
    return UnitGradients(whole or unit, groups)


class Rank:
    """Args: boxes: of how many of the largest units there is memory for."""

    before: Callable[[int], None] | None = None

    def __init__(self, world: World, rank: int, dtype: torch.dtype, boxes: int) -> None:
        self.units = [unit_of(index, dtype) for index in range(len(SIZES))]
        self.shards = [Shard(unit, RankPartition(world.count, rank)) for unit in self.units]
        self.memory: dict[int, memoryview] = {}
        self.local = [gradients_of(shard.local, self.memory, shard.full) for shard in self.shards]
        self.collectives = Collectives(world, rank)
        nbytes = boxes * max(unit.gradient_bytes for unit in self.units)
        between: Any = self.collectives
        self.space = PinnedArena(nbytes).lease(nbytes, "gradients between ranks").space()
        self.told: list[int] = []  # of each unit that lands, before it does
        outbox = GradientOutbox(self.shards, self.local, between, self.space, self._before)
        self.shared = MultiRankGradients(self.shards, self.local, between, outbox)

    def _before(self, index: int) -> None:
        self.told.append(index)
        if self.before is not None:
            self.before(index)

    def place(self, index: int, number: int) -> ParameterPlace:
        return ParameterPlace(self.units[index], 0, self.units[index].groups[0].specs[number])

    def landed(self) -> dict[str, list[tuple[int, bytes]]]:
        """Return the part of each parameter's gradient that landed here: (first element, bytes in fp32)."""
        found: dict[str, list[tuple[int, bytes]]] = {}
        for shard, local in zip(self.shards, self.local, strict=True):
            for index, group in local.groups.items():
                flat = torch.frombuffer(self.memory[shard.full.index], dtype=group.dtype)
                for piece in shard.local.groups[index].specs:
                    if piece.name in group.present:
                        values = flat[piece.offset : piece.offset + piece.numel].float()
                        whole = next(spec for spec in shard.full.groups[index].specs if spec.name == piece.name)
                        found.setdefault(piece.name, []).append((piece.index - whole.index, values.numpy().tobytes()))
        return found


def together(ranks: list[Rank], act: Callable[[Rank], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, ranks))


class Case:
    """Passes, steps and gradients that are dropped, of ranks and of one process with the gradients of all."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.dtype = self.draw.choice([torch.float32, torch.bfloat16])
        self.count = self.draw.choice([1, 2, 3, 5])
        world = World(self.count)
        self.ranks = [Rank(world, rank, self.dtype, self.draw.choice([2, 3, 8])) for rank in range(self.count)]
        self.names = [(index, number) for index in (0, 2) for number in range(len(SIZES[index]))]
        self.memory: dict[int, memoryview] = {}
        self.alone = [gradients_of(unit, self.memory) for unit in self.ranks[0].units]
        self.wanted: set[str] = set()
        self.values = torch.Generator().manual_seed(seed)

    def gradient(self, index: int, number: int) -> torch.Tensor:
        return torch.randn(SIZES[index][number], generator=self.values).to(self.dtype)

    def backward(self) -> None:
        """One pass: each rank has gradients of some parameters; some come after the unit's backward."""
        late: dict[int, list[dict[tuple[int, int], torch.Tensor]]] = {}
        for index in (2, 0):
            every = [name for name in self.names if name[0] == index]
            came = [self._some(every) for _ in self.ranks]
            later = [self._some(every, 0.2) for _ in self.ranks]
            for rank, mine in zip(self.ranks, came, strict=True):
                self._land(rank, mine)
                again = self._some(list(mine), 0.2)  # a second piece is added in the dtype they come in
                self._land(rank, again)
                mine.update({name: mine[name] + value for name, value in again.items()})
            together(self.ranks, lambda rank, index=index: rank.shared.backward_left([index]))  # type: ignore[misc]
            self._sum(index, came)
            for rank, mine in zip(self.ranks, later, strict=True):
                self._land(rank, mine)
            late[index] = later
        together(self.ranks, lambda rank: rank.shared.pass_ended())
        for index in (0, 2):
            if any(late[index]):
                self._sum(index, late[index])

    @staticmethod
    def _land(rank: Rank, values: dict[tuple[int, int], torch.Tensor]) -> None:
        for name, value in values.items():
            place = rank.place(*name)
            rank.shared.of(place).land(place.spec, value, accumulate=True)

    def _some(self, names: list[tuple[int, int]], chance: float = 0.6) -> dict[tuple[int, int], torch.Tensor]:
        return {name: self.gradient(*name) for name in names if self.draw.random() < chance}

    def _sum(self, index: int, came: list[dict[tuple[int, int], torch.Tensor]]) -> None:
        """In one process: rank by rank; what a rank has not counts as zeros where another has it, now or before."""
        group, unit = self.alone[index].groups[0], self.ranks[0].units[index]
        for mine in came:
            for number, spec in enumerate(unit.groups[0].specs):
                value = mine.get((index, number))
                group.land(spec, torch.zeros(spec.shape, dtype=self.dtype) if value is None else value, accumulate=True)
        self.wanted |= {unit.groups[0].specs[number].name for mine in came for _, number in mine}

    def drop(self) -> None:
        index, number = self.draw.choice(self.names)
        for rank in self.ranks:
            rank.shared.of(rank.place(index, number)).drop(rank.place(index, number).spec.name)
        name = self.ranks[0].place(index, number).spec.name
        self.alone[index].groups[0].drop(name)
        self.wanted -= {name}

    def step(self) -> None:
        skips = self.draw.randrange(self.count) if self.draw.random() < 0.3 else None
        decided = together(
            self.ranks,
            lambda rank: rank.shared.agreement.make(
                {"lr": 1}, "asked" if rank.collectives.rank == skips else "", (rank.collectives.rank,)
            ),
        )
        assert {each.skip for each in decided} == {"" if skips is None else f"asked (rank {skips})"}
        assert all(each.payloads == [[rank] for rank in range(self.count)] for each in decided)
        self.require_equal()

    def require_equal(self) -> None:
        for unit, alone in zip(self.ranks[0].units, self.alone, strict=True):
            for group in alone.groups.values():
                for name in group.present - self.wanted:
                    group.drop(name)
                for number, spec in enumerate(unit.groups[0].specs):
                    expected = list(group.partials(spec)) if spec.name in group.present else None
                    for rank in self.ranks:
                        shared = rank.shared.of(rank.place(unit.index, number))
                        assert (spec.name in shared.present) == (expected is not None)
                        if expected is not None:
                            assert list(shared.partials(spec)) == expected
                    self._require_values(spec, unit.index, group.dtype, there=expected is not None)

    def _require_values(self, spec: ParameterSpec, index: int, dtype: torch.dtype, *, there: bool) -> None:
        pieces = sorted(piece for rank in self.ranks for piece in rank.landed().get(spec.name, []))
        assert bool(pieces) == there
        if there:
            flat = torch.frombuffer(self.memory[index], dtype=dtype)
            values = flat[spec.offset : spec.offset + spec.numel].float()
            assert b"".join(values for _, values in pieces) == values.numpy().tobytes()


@pytest.mark.parametrize("seed", range(sampling.number(6, 150)))
def test_owners_have_the_sums_of_one_process_and_all_ranks_know_the_same(seed: int) -> None:
    case = Case(1000 * sampling.SEED + seed)
    for _ in range(6):
        act = case.draw.choice([case.backward, case.backward, case.step, case.drop])
        act()
    case.step()


def test_a_gradient_whose_way_was_interrupted_is_landed_later() -> None:
    (rank,) = ranks = [Rank(World(1), 0, torch.float32, 2)]
    place = rank.place(2, 0)
    rank.shared.of(place).land(place.spec, torch.ones(SIZES[2][0]), accumulate=True)
    rank.collectives.failure = PeerError("interrupted")
    together(ranks, lambda rank: rank.shared.backward_left([2]))
    with pytest.raises(PeerError):
        rank.shared.synchronize()
    rank.collectives.tickets[-1].failure = None
    rank.shared.synchronize()
    assert rank.landed()["2.0"]


def test_a_gradient_that_could_not_land_yet_is_landed_later() -> None:
    """An update that reads those that are there is undone before, which may fail."""
    rank = Rank(World(1), 0, torch.float32, 2)
    failures = [SwapIOError("reading", path="swap")]

    def before(index: int) -> None:
        if failures:
            raise failures.pop()

    rank.before = before
    arrive(rank, 2, 0)
    with pytest.raises(SwapIOError):
        rank.shared.backward_left([2])
    rank.shared.synchronize()
    assert rank.landed()["2.0"]


def test_a_gradient_that_is_lost_while_it_lands_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(World(1), 0, torch.float32, 2)
    free_bytes = rank.space.free_bytes
    arrive(rank, 2, 0)

    def fail(*given: Any, **how: Any) -> None:
        raise SwapIOError("writing", path="swap")

    with monkeypatch.context() as patch:
        patch.setattr(rank.local[2].groups[0], "land", fail)
        with pytest.raises(SwapIOError):
            rank.shared.backward_left([2])
    assert rank.space.free_bytes == free_bytes
    assert rank.shared.take_completed() == []
    arrive(rank, 2, 0)
    rank.shared.pass_ended()
    rank.shared.synchronize()
    assert rank.landed()["2.0"]


def arrive(rank: Rank, index: int, number: int) -> None:
    place = rank.place(index, number)
    rank.shared.of(place).land(place.spec, torch.ones(SIZES[index][number]), accumulate=True)
    rank.local[index].arrivals.came(place.spec.name)


def test_a_unit_is_completed_once_all_that_this_rank_expects_of_it_has_landed() -> None:
    rank = Rank(World(1), 0, torch.float32, 8)
    arrive(rank, 2, 0)
    rank.shared.backward_left([2])  # one of two: the unit is used twice
    arrive(rank, 2, 1)
    rank.shared.backward_left([2])
    arrive(rank, 0, 0)
    rank.shared.backward_left([0])
    assert rank.told == [2, 2, 0]
    assert rank.shared.take_completed() == [2]
    arrive(rank, 0, 1)
    arrive(rank, 0, 2)
    rank.shared.pass_ended()  # what comes late is not waited for
    rank.shared.synchronize()
    assert rank.told == [2, 2, 0, 0]
    assert rank.shared.take_completed() == []


def test_at_the_end_of_a_pass_everything_that_was_sent_has_landed() -> None:
    ranks = [Rank(world := World(2), 0, torch.float32, 8), Rank(world, 1, torch.float32, 8)]

    def backward(rank: Rank) -> list[int]:
        for number in range(2):
            arrive(rank, 2, number)
        rank.shared.backward_left([2])
        rank.shared.pass_ended()
        return rank.shared.take_completed()

    assert together(ranks, backward) == [[2], [2]]


def test_what_reads_gradients_is_told_before_others_land() -> None:
    rank = Rank(World(1), 0, torch.float32, 2)
    seen: list[bool] = []
    rank.before = lambda index: seen.append(bool(rank.landed()))
    arrive(rank, 2, 0)
    rank.shared.backward_left([2])
    assert seen == [False]
    assert rank.landed()


def test_a_gradient_that_is_dropped_on_its_way_is_no_part_of_the_next() -> None:
    rank = Rank(World(1), 0, torch.float32, 2)
    place, ones = rank.place(2, 0), torch.ones(SIZES[2][0])
    shared = rank.shared.of(place)
    shared.land(place.spec, ones, accumulate=True)
    rank.shared.pass_ended()
    shared.drop(place.spec.name)
    shared.land(place.spec, 2 * ones, accumulate=True)
    rank.shared.pass_ended()
    rank.shared.synchronize()
    assert b"".join(values for _, values in rank.landed()[place.spec.name]) == (2 * ones).numpy().tobytes()


def test_what_differs_is_named_with_the_rank() -> None:
    ranks = [Rank(world := World(2), 0, torch.float32, 2), Rank(world, 1, torch.float32, 2)]

    def told(rank: Rank) -> str:
        with pytest.raises(PeerError, match="lr differs") as error:
            rank.shared.agreement.make({"lr": rank.collectives.rank}, "", ())
        return str(error.value)

    assert [("rank 1" in each, "rank 0" in each) for each in together(ranks, told)] == [(True, False), (False, True)]


def test_partials_are_those_of_the_native_sums() -> None:
    sums = _native.sums_of_squares(torch.ones(3 * PARTIAL_NUMEL + 1).numpy(), "fp32", pool=POOL)
    assert list(sums) == [PARTIAL_NUMEL] * 3 + [1]
    assert all(
        trained(shard) == ([] if shard.full.index == FROZEN else [0])
        for shard in Rank(World(1), 0, torch.float32, 2).shards
    )
