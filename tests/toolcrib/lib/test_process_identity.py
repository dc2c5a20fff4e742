import os
import socket
import subprocess
import sys

import pytest

from toolcrib.lib import process_identity

HOST = socket.gethostname()
# As Docker mounts it; what is above differs by container, and stays when one is restarted.
MOUNTED = (
    "1 0 0:50 / /proc rw - proc proc rw\n"
    "733 612 0:56 / / rw,relatime master:300 - overlay overlay rw,lowerdir=/docker/overlay2/l/A:"
    "/docker/overlay2/l/B,upperdir=/docker/overlay2/{}/diff,workdir=/docker/overlay2/{}/work\n"
    "734 733 0:59 / /data rw - ext4 /dev/sda1 rw\n"
)


@pytest.fixture
def gone():
    """The number of a process that ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


@pytest.fixture
def in_container(tmp_path, monkeypatch):
    """Have this process run in a container of this name."""
    monkeypatch.setattr(process_identity, "MOUNTS", tmp_path / "mountinfo")
    return lambda name: process_identity.MOUNTS.write_text(MOUNTED.format(name, name))


def named(*, namespace=None, pid=None):
    """This process as a holder, but for what is said."""
    place, own_pid, started = process_identity.this_process().rsplit(" ", 2)
    host, own_namespace, root = place.split("/")
    return f"{host}/{namespace or own_namespace}/{root} {pid or own_pid} {started}"


def test_a_process_that_lives_is_not_dead_and_one_that_ended_is(gone):
    assert not process_identity.is_dead(process_identity.this_process())
    assert process_identity.is_dead(named(pid=gone))
    assert process_identity.is_dead(process_identity.this_process() + "1")  # began at another time


def test_a_process_of_another_namespace_or_machine_is_not_taken_for_dead(gone):
    assert not process_identity.is_dead(named(namespace="1", pid=gone))
    assert not process_identity.is_dead("elsewhere" + named(pid=gone))


def test_of_two_containers_with_one_host_name_none_takes_the_other_for_dead(gone, in_container):
    in_container("first")
    other = named(namespace="1", pid=gone)
    in_container("second")
    assert not process_identity.is_dead(other)


def test_what_a_container_held_before_it_was_restarted_is_free(in_container):
    in_container("first")
    assert process_identity.is_dead(named(namespace="1"))


def test_holders_of_before_are_judged_as_they_were(gone):
    started = process_identity.this_process().rsplit(" ", 1)[1]
    assert not process_identity.is_dead(f"{HOST} {os.getpid()} {started}")
    assert process_identity.is_dead(f"{HOST} {os.getpid()} 1")
    assert process_identity.is_dead(f"{HOST} {gone} {started}")
    assert not process_identity.is_dead(f"elsewhere {gone} {started}")
    assert not process_identity.is_dead("")
    assert not process_identity.is_dead(HOST)


def test_the_name_of_a_holder_fits_its_column(in_container):
    in_container("first")
    assert len(process_identity.this_process()) - len(HOST) + 150 <= 200
