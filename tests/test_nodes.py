"""64 hosts of four ranks each, started here: what they ask and hold grows with the hosts, not with their square."""

import os
import shutil

import pytest

from tests import nodes

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1200)]
HOSTS, RANKS = 64, 4


@pytest.fixture(autouse=True)
def can_make_hosts():
    if os.getuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("hosts with names and networks of their own need root, ip (iproute2) and unshare")


def test_a_run_on_64_hosts_has_few_connections_and_asks_the_folder_little():
    told = nodes.main("run", HOSTS, RANKS)
    print(told)
    status, reason, hosts, _ = told["record"]
    assert (status, hosts) == ("finished", HOSTS), reason
    assert told["sockets of all ranks, of the one with most"][0] < 6 * HOSTS * RANKS
    assert told["calls/s of all hosts while training"] < HOSTS
    assert told["calls before: all hosts, median host, first host"][0] < 60 * HOSTS * RANKS


def test_a_command_measured_on_64_hosts_asks_the_folder_by_its_ranks_not_their_square():
    told = nodes.main("measure", HOSTS, RANKS)
    print(told)
    assert told["record"][0] == "finished" and told["record"][2] == HOSTS
    asked = sum(
        told[f"calls {span}: all hosts, median host, first host"][0] for span in ("before", "training", "after")
    )
    assert asked < 150 * HOSTS * RANKS
