"""Messages that name a command, an option or a call, and that no test is known to follow yet. The list only gets
shorter: with a test that follows one, it moves to FOLLOWED."""

from __future__ import annotations

OPEN: dict[str, tuple[str, ...]] = {
    'cli/doctor/core.py': ('--force-reinstall --no-deps --no-binary infin',),
    'cli/doctor/machine.py': ('numactl --cpunodebind=<> --membind=<> i',),
    'coordinator/gathering.py': ('other, or go through infinity.state_dict(model), which has ', 'rank 0 at the end of infinity.gathered(..., write=True). ', 'change values only. model.resize_token_embeddings() needs no infinit', '<>, and was changed in infinity.gathered(..., write=True). ', 'and was changed in infinity.gathered(..., write=True): ',),
    'coordinator/resuming.py': ('or convert them with `infinity checkpoint export` and --fro',),
    'coordinator/speculator.py': ('but the last inside model.no_sync().',),
    'coordinator/exact.py': ('`infinity checkpoint export` writes it whole',),
    'optim/groups.py': ('is not offloaded: call infinity.offload(model, config) bef', 'are in the store. infinity.commit(model) and commit_',),
    'optim/offloaded.py': ('infinity run --resume FOLDER),',),
    'runtime/anew.py': ('the model, then call infinity.offload(model, config).',),
    'runtime/gathered.py': ('infinity.gathered(..., write=True) i', 'model, not <>; write infinity.gathered(model, *several)',),
    'runtime/guards.py': ('<>. To write it, use infinity.save_pretrained(model, directory);',),
    'coordinator/structure.py': ('(after infinity.load_pretrained(defer=True)), or m',),
    'runtime/hooks.py': ('or call model.to(torch.bfloat16) be',),
    'runtime/offload.py': ("<>: go on from it with infinity.offload_from_checkpoint(model, '<>', confi", 'is offloaded already; infinity.close(model) ends that',),
    'runtime/tiles.py': ('(after infinity.load_pretrained(path, config, defe', 'Take model.parameters() again, after the optimizer is made.',),
    'runtime/track.py': ('models; say which: infinity.track(..., model=model)',),
    'state/released.py': ('forward, or in `with infinity.gathered(model, module):`, ', 'or loaded with infinity.load_pretrained(path, dtype=...). ', 'of infinity, such as infinity.AdamW(model.parameters()', 'elsewhere use `with infinity.gathered(model, module):`, ', 'Change it in `with infinity.gathered(model, module, wri', 'other.load_state_dict(model.state_dict()). <>',),
    'units/parameters.py': ('lost. Do it in `with infinity.gathered(model, module, wri',),
}
"""By file: a part of each sentence."""
