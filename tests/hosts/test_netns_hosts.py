"""Hosts of this machine's own: they are there, they answer, they are slow as asked, and nothing of them is left."""

import os
import subprocess
import sys

import pytest

from suite.pipeline.planning.simulate import Link
from tests.hosts.bridged_hosts import BridgedHosts, on_host
from tests.hosts.netns_hosts import Hosts, run

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

SERVER = """
import socket, sys
listening = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    with listening.accept()[0] as one:
        while data := one.recv(1 << 20):
            one.sendall(data[-1:]) if data.endswith(b"!") else None
"""

CLIENT = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=5) as one:
    for size in map(int, sys.argv[2:]):
        begin = time.monotonic()
        one.sendall(b"." * (size - 1) + b"!")
        assert one.recv(1) == b"!"
        print(time.monotonic() - begin)
"""


def python(hosts, host, program, *arguments):
    return on_host(hosts, host, [sys.executable, "-c", program, *map(str, arguments)])


def answers(hosts, *sizes):
    """Returns the seconds from host 0 to host 1 and back, of messages that one byte answers."""
    with subprocess.Popen(python(hosts, 1, SERVER, hosts.addresses[1]), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "ready\n"
        command = python(hosts, 0, CLIENT, hosts.addresses[1], *sizes)
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        server.kill()
    assert done.returncode == 0, done.stderr
    return list(map(float, done.stdout.split()))


def namespaces():
    return run("ip", "netns", "list")


@as_root
def test_hosts_answer_each_other_and_leave_nothing_behind():
    left = f"gpipe-4194305-{os.getpid()}-0"  # by a process of a number that no process has
    run("ip", "netns", "add", left)
    with BridgedHosts(2) as hosts:
        assert left not in namespaces()
        assert answers(hosts, 1)
        command = on_host(hosts, 0, ["sh", "-c", "echo entered; exec sleep 600"])
        stays = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert stays.stdout.readline() == "entered\n"  # before that it is in no host
    with stays:
        assert stays.wait(10) != 0
    assert not any(name in namespaces() for name in hosts.names)


@as_root
def test_a_link_is_as_slow_as_it_was_asked_to_be():
    with Hosts(2, Link(0.02, 2e6)) as hosts:
        first, second = answers(hosts, 1, 400_000)
    assert first >= 0.04
    assert second >= 0.04 + 0.2


@pytest.mark.slow
@as_root
def test_a_host_that_is_cut_off_answers_no_more():
    with BridgedHosts(2) as hosts:
        assert answers(hosts, 1)
        hosts.cut_off(1)
        with pytest.raises(AssertionError, match=r"timed out|No route to host"):
            answers(hosts, 1)
