"""Imports that processes forked by tests need (tests/processes.py), made once in advance.

The existing objects are frozen, because a garbage collector that walks through objects copies their pages in its
process.
"""

import gc

import peft
import torch._dynamo  # the first optimizer of a process imports both
import torch.distributed.tensor
import torch.utils.tensorboard
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTTrainer

import infinity.cli.bench.main
import infinity.cli.finetune
import infinity.cli.main
import infinity.integrations.accelerate
import infinity.integrations.models
import infinity.integrations.strategy
import infinity.integrations.transformers
import infinity.ranks.exchange
import tests.crash.job
import tests.crash.pinned_job
import tests.crash.rotating_job
import tests.stress.worker

__all__ = ["LlamaForCausalLM", "PreTrainedTokenizerFast", "SFTTrainer", "infinity", "peft", "tests", "torch"]

gc.collect()
gc.freeze()
