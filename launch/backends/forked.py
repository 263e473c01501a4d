"""The forkserver imports this first. Full garbage collections would take a fifth of its imports, and find little; those
of its workers leave out the objects that they share with it."""

import gc
import os

usual = gc.get_threshold()
gc.set_threshold(*usual[:2], 100)
os.register_at_fork(before=gc.freeze, after_in_child=lambda: gc.set_threshold(*usual))
