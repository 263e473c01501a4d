"""The store where workers meet listens on the address it is given, and on no other."""

from datetime import timedelta

import psutil
from torch.distributed import TCPStore

from launch.backends.network_interface import rendezvous_store


def test_the_store_listens_on_one_address():
    store = rendezvous_store("127.0.0.1")
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == store.port
    ]
    assert listening == ["127.0.0.1"]
    TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20)).set("a", "b")
    assert store.get("a") == b"b"
