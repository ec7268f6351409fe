"""Imports that are made once, in advance, for the processes that tests fork (tests/processes.py).

The existing objects are frozen, because a garbage collector that visits shared objects makes a copy of their pages in
its process.
"""

import gc

import peft
import torch._dynamo  # the first optimizer of a process imports both modules
import torch.distributed.tensor
import torch.utils.tensorboard
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTTrainer

import infinity.cli.bench.main
import infinity.cli.finetune
import infinity.cli.main
import infinity.cli.training
import infinity.integrations.accelerate
import infinity.integrations.from_pretrained
import infinity.integrations.strategy
import infinity.integrations.transformers
import infinity.ranks.collective_queue
import tests.crash.job
import tests.crash.pinned_job
import tests.crash.rotating_job
import tests.stress.worker

__all__ = ["LlamaForCausalLM", "PreTrainedTokenizerFast", "SFTTrainer", "infinity", "peft", "tests", "torch"]

gc.collect()
gc.freeze()
gc.enable()  # tests/quick_imports.py
