"""Starting and leaving Ray keeps a process's SIGTERM handler; a local Ray's processes have this one's priority."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal
from launch.backends import ray_init
import ray._private.worker

nice = os.nice(0)
handled = []
signal.signal(signal.SIGTERM, lambda number, frame: handled.append(number))
ray_init.init(address="local", num_cpus=1)
of_worker = ray.get(ray.remote(lambda: os.nice(0)).remote())
os.kill(os.getpid(), signal.SIGTERM)
node = ray._private.worker._global_node
end_processes = node.kill_all_processes

def signal_first(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    end_processes(*arguments, **options)

node.kill_all_processes = signal_first
ray_init.shutdown()
os.kill(os.getpid(), signal.SIGTERM)
print("handled", len(handled), "nicer by", of_worker - nice)
"""


@pytest.mark.slow
def test_sigterm_is_handled_throughout_and_workers_are_not_nicer(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout == "handled 3 nicer by 0\n", (done.returncode, done.stderr)
