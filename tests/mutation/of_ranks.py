"""Mutants of several ranks: gradients that are exchanged, facts that all ranks must share, common generations."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_SHARED = "tests/sharded/test_multi_rank_gradients.py"
_SEVERAL = "tests/durable/test_commits.py"
_STORES = "tests/sharded/test_rank_stores.py"
_GENERATIONS = "tests/runtime/test_rank_generations.py"
_PINS = "tests/runtime/test_rank_pins.py"
_GROUPS = "tests/runtime/test_gather_groups.py"
_EXPERTS = "tests/runtime/test_rank_experts.py"
_GATHERED = "tests/sharded/test_gathered_slots.py"
_ENCODED = "tests/runtime/test_ranks_encoded.py"
_BEGIN = "tests/runtime/test_ranks_begin.py"
_WRITES = "tests/runtime/test_rank_writes.py"
_NOT_NAMED = ("tests/ranks/test_watch.py", "-k", "is_not_named")

OF_RANKS = [
    Mutant(
        "owners add rank by rank",
        "infinity/sharded/outbox.py",
        "                        flat = _bytes_of(arrived.received, at, nbytes).view(dtype)\n",
        "                        at = at or (shard.cut.count - 1) * nbytes\n"
        "                        flat = _bytes_of(arrived.received, at, nbytes).view(dtype)\n"
        "                        at -= 2 * nbytes\n",
        (_SHARED, "-k", "sums_of_one_process"),
    ),
    Mutant(
        "the owner adds its own piece in its turn",
        "infinity/sharded/outbox.py",
        "                for rank in range(shard.cut.count):  # in the order of the ranks\n",
        "                for rank in sorted(range(shard.cut.count), key=lambda each: each not in senders):\n",
        ("tests/runtime/test_ranks.py", "-k", "bits_of_one_process"),
    ),
    Mutant(
        "what a rank has no gradient of is zero",
        "infinity/sharded/outbox.py",
        "                after=[*landed, partial(_zero_missing, box, shard, group_index)],\n",
        "                after=landed,\n",
        (_SHARED, "-k", "sums_of_one_process"),
    ),
    Mutant(
        "a second piece is added",
        "infinity/sharded/outbox.py",
        "            flat.add_(values)\n",
        "            flat.copy_(values)\n",
        (_SHARED, "-k", "sums_of_one_process"),
    ),
    Mutant(
        "an interrupt while a gradient comes leaves it to be landed",
        "infinity/sharded/outbox.py",
        "        for ticket in self._on_way[0].tickets:\n            ticket.result()\n"
        "        self._land(self._on_way[0])\n",
        "        first = self._on_way.popleft()\n        for ticket in first.tickets:\n            ticket.result()\n"
        "        self._on_way.appendleft(first)\n        self._land(first)\n",
        (_SHARED, "-k", "interrupted"),
    ),
    Mutant(
        "a gradient that is dropped does not land later",
        "infinity/sharded/multi_rank_gradients.py",
        "        self._outbox.land_all()  # gradients in flight would land after the drop\n",
        "",
        (_SHARED, "-k", "dropped"),
    ),
    Mutant(
        "zeros of what no rank has are no gradient",
        "infinity/sharded/multi_rank_gradients.py",
        "        self._drop_zeros()\n",
        "",
        (_SHARED, "-k", "sums_of_one_process"),
    ),
    Mutant(
        "of several ranks a generation is prepared, and retired later",
        "infinity/sharded/multi_rank_generation_maker.py",
        "        generations.prepare(step, facts, body)\n",
        "        generations.make(step, facts, body)\n",
        (_SEVERAL, "-k", "several_ranks"),
    ),
    Mutant(
        "those generations exist that all ranks have",
        "infinity/sharded/multi_rank_generation_maker.py",
        "            self._generations.retire(set.intersection(*(set(steps) for _, *steps in told)))\n",
        "            self._generations.retire(set.union(*(set(steps) for _, *steps in told)))\n",
        (_SEVERAL, "-k", "several_ranks"),
    ),
    Mutant(
        "ranks commit as rarely as any of them must",
        "infinity/sharded/multi_rank_generation_maker.py",
        "            pace.lead(max(every for every, *_ in told), following)\n",
        "",
        (_SEVERAL, "-k", "several_ranks"),
    ),
    Mutant(
        "a run of another number of ranks is not written over",
        "infinity/sharded/rank_stores.py",
        "            if generations_in(entry) or pinned_in(entry):\n",
        "            if False:\n",
        (_STORES, "-k", "in_the_way"),
    ),
    Mutant(
        "the newest step that is whole on all ranks, not on one",
        "infinity/sharded/recovery.py",
        "        if not any(failed):\n",
        "        if not problem:\n",
        (_GENERATIONS, "-k", "no_whole_generation and state"),
    ),
    Mutant(
        "ranks find a store of the same run, or all of them none",
        "infinity/sharded/rank_agreement.py",
        "        if without:\n",
        "        if False:\n",
        (_GENERATIONS, "-k", "one_rank_lacks"),
    ),
    Mutant(
        "what one rank unpins all unpin",
        "infinity/access/generation_pinning.py",
        "lambda: kept.keep_pins(set.intersection(*map(set, told))))\n",
        "lambda: None)\n",
        (_PINS, "-k", "one_rank_lets_go"),
    ),
    Mutant(
        "a folder is pinned where all ranks pin it",
        "infinity/io/generations.py",
        " or pin.folder not in eligible.folders:\n",
        ":\n",
        (_PINS, "-k", "its_pin_goes_with_the_next_resume"),
    ),
    Mutant(
        "what ranks go on from are parts of one generation, not of two of the same step",
        "infinity/io/generation_scan.py",
        '    return manifest.step, manifest.life or ""\n',
        '    return manifest.step, ""\n',
        (_PINS, "-k", "another_generation_of_the_step"),
    ),
    Mutant(
        "copies of weights are of the last update",
        "infinity/sharded/gathered_slots.py",
        "        if copy is not None and copy.version == version:\n",
        "        if copy is not None and copy.version >= 0:\n",
        (_GROUPS, "-k", "frozen_and_unused"),
    ),
    Mutant(
        "copies are filled by what comes from all ranks",
        "infinity/sharded/gather_memory.py",
        "            keep(index, lease)\n",
        "            pass\n",
        (_GROUPS, "-k", "frozen_and_unused"),
    ),
    Mutant(
        "a buffer of encoded weights is free once they are decoded",
        "infinity/sharded/gather_memory.py",
        "        return [own(index, ahead), self._wait_for_buffer, ",
        "        return [own(index, ahead), ",
        (_GATHERED, "-k", "after_what_was_in_it"),
    ),
    Mutant(
        "a slice of encoded weights is not read into a buffer that is in use",
        "infinity/sharded/gather_memory.py",
        "        if lease is self._slot:\n",
        "        if True:\n",
        (_GATHERED, "-k", "after_what_was_in_it"),
    ),
    Mutant(
        "a slot of several ranks is ready once its weights are decoded",
        "infinity/sharded/gather_memory.py",
        "        wait_all(self._decodings)\n",
        "",
        (_GATHERED, "-k", "when_its_weights_are_decoded"),
    ),
    Mutant(
        "another number of ranks has the bytes of the encoded weights",
        "infinity/checkpoint/from_portable.py",
        "[copy.encoded_forms] if isinstance",
        "[] if isinstance",
        (_ENCODED, "-k", "goes_on_with_any_number"),
    ),
    Mutant(
        "experts that are apart need weights that all ranks share",
        "infinity/plan/planner.py",
        "    if limits.gathers and any(unit.full.routed for unit in plan.layout.units):\n",
        "    if False:\n",
        (_EXPERTS, "-k", "need_weights"),
    ),
    Mutant(
        "ranks send the gradients of all experts in one order",
        "infinity/sharded/multi_rank_gradients.py",
        "            if index not in self._routed:\n",
        "            if True:\n",
        (_EXPERTS, "-k", "one_process"),
    ),
    Mutant(
        "auto keeps copies where all ranks have room for them",
        "infinity/sharded/rank_agreement.py",
        " and 2 * most > least[1] else",
        " and False else",
        (_GROUPS, "-k", "have_no_room"),
    ),
    Mutant(
        "a gather over G is told apart from one over W",
        "infinity/ranks/headers.py",
        "(_GATHERS_AGAIN, gather) if moved.near else (_GATHERS, shard)\n",
        "(_GATHERS, gather) if moved.near else (_GATHERS, shard)\n",
        ("tests/ranks/test_headers.py",),
    ),
    Mutant(
        "the marker of a folder names the generations of all ranks",
        "infinity/io/generation_pins.py",
        "        return self.digests[rank] if self.digests else self.digest\n",
        "        return self.digest\n",
        (_PINS, "-k", "each_folder"),
    ),
    Mutant(
        "a generation goes early only where all ranks have made the newest",
        "infinity/sharded/multi_rank_generation_maker.py",
        "        if all(step == generations.newest for step in self._world.collectives.heard):\n",
        "        if any(step == generations.newest for step in self._world.collectives.heard):\n",
        ("tests/durable/test_commits.py",),
    ),
    Mutant(
        "no update reads gradients while those of other ranks are added to them",
        "infinity/sharded/outbox.py",
        "        self._before_landing(shard.full.index)\n",
        "",
        ("tests/sharded/test_multi_rank_gradients.py", "tests/runtime/test_ranks.py"),
    ),
    Mutant(
        "an update begins early once the gradients of all ranks have landed",
        "infinity/sharded/multi_rank_gradients.py",
        "        self._units[index].send()\n        return ()\n",
        "        self._units[index].send()\n        return (index,)\n",
        ("tests/runtime/test_ranks.py",),
    ),
    Mutant(
        "a slice is gathered from the memory that its new values rest in",
        "infinity/sharded/gathered_slots.py",
        "        rests_in = new.rests_in\n",
        "        rests_in = home.lease\n",
        ("tests/runtime/test_ranks.py",),
    ),
    Mutant(
        "the first speculation knows over how many ranks gradients are averaged",
        "infinity/optim/offloaded.py",
        "        self._inverse_scale = inverse_of(float(self.coordinator.world.size))\n",
        "",
        ("tests/runtime/test_ranks.py", "-k", "on_every_rank"),
    ),
    Mutant(
        "what a rank tells is taken in by those that are at the same",
        "infinity/ranks/collective_queue.py",
        '        return self.all_gather(zlib.crc32(name.partition("/")[0].encode()), name, payload)\n',
        "        return self.all_gather(0, name, payload)\n",
        ("tests/ranks/test_collective_queue.py", "-k", "different_things"),
    ),
    Mutant(
        "a folder that one rank could not pin is pinned by none",
        "infinity/access/generation_pinning.py",
        "lambda: kept.unpin(folder))\n        raise\n",
        "lambda: None)\n        raise\n",
        (_PINS, "-k", "pinned_again"),
    ),
    Mutant(
        "values that ranks made in memory are those of rank 0",
        "infinity/sharded/initial_values.py",
        "            values[name] = self.of_rank_0(name, values[name])\n",
        "            pass\n",
        (_BEGIN, "-k", "not_seeded"),
    ),
    Mutant(
        "ranks train on the files of one checkpoint",
        "infinity/sharded/initial_values.py",
        "            if name not in values or not in_memory(name):\n",
        "            if False:\n",
        (_BEGIN, "-k", "different_checkpoints"),
    ),
    Mutant(
        "whether there are generations to go on from is decided by all ranks",
        "infinity/checkpoint/load_pretrained.py",
        "bool(set.intersection(*(set(steps) for steps, _ in told)))\n",
        "bool(mine)\n",
        (_BEGIN, "-k", "begins_anew"),
    ),
    Mutant(
        "ranks write the same values",
        "infinity/access/gathering.py",
        "        if theirs == told[0]:\n",
        "        if True:\n",
        (_WRITES, "-k", "different_things"),
    ),
    Mutant(
        "a generation that ranks made is not made again after a write",
        "infinity/durable/commits.py",
        "        return self._touched and not self._maker.makes_again\n",
        "        return False\n",
        (_WRITES, "-k", "stays_as_it_was"),
    ),
    Mutant(
        "a gradient that one rank has dropped is named",
        "infinity/sharded/multi_rank_gradients.py",
        "            if facts and rank:\n",
        "            if False:\n",
        ("tests/runtime/test_ranks_together.py", "-k", "does_otherwise"),
    ),
    Mutant(
        "a rank commits by what all have heard",
        "infinity/durable/commit_pace.py",
        "            if not self._agreed:\n",
        "            if True:\n",
        ("tests/durable/test_commit_pace.py", "-k", "agreed_on"),
    ),
    Mutant(
        "a rank without slices gathers as the others do",
        "infinity/sharded/gathered_slots.py",
        "        if near is not None:  # the same on all ranks, even if the slice of a rank is empty\n",
        "        if near is not None and resources.plan.layout.arena.secondary:\n",
        (_GROUPS, "-k", "no_slice_of_anything"),
    ),
    Mutant(
        "a rank that loses the store is not named beside the host of the store",
        "infinity/ranks/watch.py",
        "        return ended if self._store_rank not in ended else ended & {self._store_rank}\n",
        "        return ended\n",
        _NOT_NAMED,
    ),
    Mutant(
        "a rank that notices a dead rank says so before it ends",
        "infinity/ranks/watch.py",
        "            self.announce(verdict)  #",
        "            pass  #",
        _NOT_NAMED,
    ),
]
