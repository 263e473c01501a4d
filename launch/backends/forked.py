"""The forkserver imports this first. Full garbage collections would take a fifth of its imports, and find little; those
of its workers leave out the objects that they share with it. It adopts what a dead worker leaves running."""

import ctypes
import gc
import os
import warnings

usual = gc.get_threshold()
gc.set_threshold(*usual[:2], 100)
os.register_at_fork(before=gc.freeze, after_in_child=lambda: gc.set_threshold(*usual))
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: it adopts the orphans below it
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # of an orphan
