import os
import socket
import subprocess
import sys

import pytest

from toolcrib.lib import process_identity

HOST = socket.gethostname()
# As mounted by Docker: upperdir differs between containers and survives a restart.
MOUNTED = (
    "1 0 0:50 / /proc rw - proc proc rw\n"
    "733 612 0:56 / / rw,relatime master:300 - overlay overlay rw,lowerdir=/docker/overlay2/l/A:"
    "/docker/overlay2/l/B,upperdir=/docker/overlay2/{}/diff,workdir=/docker/overlay2/{}/work\n"
    "734 733 0:59 / /data rw - ext4 /dev/sda1 rw\n"
)


@pytest.fixture
def dead_pid():
    """Return the PID of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


@pytest.fixture
def in_container(tmp_path, monkeypatch):
    """Make this process appear to run in a container with this name."""
    monkeypatch.setattr(process_identity, "MOUNTS", tmp_path / "mountinfo")
    return lambda name: process_identity.MOUNTS.write_text(MOUNTED.format(name, name))


def holder(*, namespace=None, pid=None):
    """Return the identity of this process with some parts replaced."""
    place, own_pid, started = process_identity.this_process().rsplit(" ", 2)
    host, own_namespace, root = place.split("/")
    return f"{host}/{namespace or own_namespace}/{root} {pid or own_pid} {started}"


def test_a_running_process_is_not_dead_and_an_ended_one_is(dead_pid):
    assert not process_identity.is_dead(process_identity.this_process())
    assert process_identity.is_dead(holder(pid=dead_pid))
    assert process_identity.is_dead(process_identity.this_process() + "1")  # another start time


def test_a_process_of_another_namespace_or_machine_is_not_considered_dead(dead_pid):
    assert not process_identity.is_dead(holder(namespace="1", pid=dead_pid))
    assert not process_identity.is_dead("elsewhere" + holder(pid=dead_pid))


def test_containers_with_the_same_host_name_do_not_consider_each_other_dead(dead_pid, in_container):
    in_container("first")
    other = holder(namespace="1", pid=dead_pid)
    in_container("second")
    assert not process_identity.is_dead(other)


def test_a_lease_of_a_container_from_before_its_restart_is_free(in_container):
    in_container("first")
    assert process_identity.is_dead(holder(namespace="1"))


def test_holders_in_the_old_format_are_still_understood(dead_pid):
    started = process_identity.this_process().rsplit(" ", 1)[1]
    assert not process_identity.is_dead(f"{HOST} {os.getpid()} {started}")
    assert process_identity.is_dead(f"{HOST} {os.getpid()} 1")
    assert process_identity.is_dead(f"{HOST} {dead_pid} {started}")
    assert not process_identity.is_dead(f"elsewhere {dead_pid} {started}")
    assert not process_identity.is_dead("")
    assert not process_identity.is_dead(HOST)


def test_the_identity_fits_its_database_column(in_container):
    in_container("first")
    assert len(process_identity.this_process()) - len(HOST) + 150 <= 200
