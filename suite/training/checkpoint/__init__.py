"""Checkpoints that any K, R and schedule can read: one file per layer, and a manifest that is written last.

    checkpoints/00000050/layer-0000.<save>.safetensors     value/<name>: parameters and buffers
                         layer-0001.<save>.safetensors     state/<parameter>/<name>: full optimizer state
                         manifest.json                     step, size and digest of all layer files, a seal of itself
                         good                              a finite step followed; written with the next checkpoint
                         best                              no validation before was better
                         abandoned                         the run continued from an earlier one
                owner.json                                 the driver that writes them

A folder without a manifest that matches its files is not a checkpoint: it is logged, and the previous one is used.
"""

from suite.training.checkpoint.choice import Choice, best_of, in_order, parse_choice
from suite.training.checkpoint.loading import (
    check_model,
    layer_differences,
    load_layer,
    load_optimizer,
    load_values,
    values_of,
)
from suite.training.checkpoint.ownership import claim
from suite.training.checkpoint.readers import Readers
from suite.training.checkpoint.reading import Checkpoint, audit, current, folders_of, list_checkpoints, newest_valid
from suite.training.checkpoint.retention import abandon_later
from suite.training.checkpoint.storage import Storage
from suite.training.checkpoint.writing import Saver
