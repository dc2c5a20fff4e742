"""The in-memory broker wakes its consumer and keeps every message."""

import threading

import pytest
from kombu.connection import Connection

from tests.support.waiting import scaled
from toolcrib.celery import app
from toolcrib.runtime.memory_broker import Transport


@pytest.fixture
def connection():
    with Connection("memory://") as opened:
        yield opened


def test_embedded_mode_uses_it():
    assert isinstance(app.connection_for_read().transport, Transport)


def test_a_message_wakes_a_waiting_consumer(connection):
    received = []
    arrived = threading.Event()

    def consume():
        with connection.SimpleQueue("wakes") as queue:
            ready.set()
            received.append(queue.get(timeout=scaled(30)).payload)
            arrived.set()

    ready = threading.Event()
    threading.Thread(target=consume, daemon=True).start()
    assert ready.wait(scaled(10))
    with Connection("memory://") as sender, sender.SimpleQueue("wakes") as queue:
        queue.put("one")
    assert arrived.wait(scaled(10))
    assert received == ["one"]


def test_messages_sent_before_the_consumer_waits_are_delivered_in_order(connection):
    with connection.SimpleQueue("order") as queue:
        for number in range(5):
            queue.put(number)
        messages = [queue.get(timeout=scaled(10)) for _ in range(5)]
    assert [message.payload for message in messages] == [0, 1, 2, 3, 4]


def test_an_empty_queue_times_out(connection):
    with connection.SimpleQueue("empty") as queue, pytest.raises(queue.Empty):
        queue.get(timeout=0.01)
