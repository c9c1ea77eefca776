"""The printed address of a socket that listens everywhere can be typed on another PC; our packages are ours."""

import pytest

from daemon.host.machine import foreign_owners, own_address, reachable


def test_every_address_becomes_one_that_is_this_pc_s():
    host = own_address()
    assert host not in ("", "127.0.0.1", "localhost")
    assert reachable("http://0.0.0.0:9470") == reachable("http://[::]:9470") == f"http://{host}:9470"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9470", "http://10.1.2.3:9470", "http://pc-7.plant.lan:9470"])
def test_an_address_that_was_chosen_is_left_alone(url: str):
    assert reachable(url) == url


def test_no_other_distribution_owns_our_package_names() -> None:
    assert foreign_owners() == {}
