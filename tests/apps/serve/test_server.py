"""Laws of the HTTP server: connections that send nothing useful end."""

import socket
import threading
import time
from contextlib import contextmanager

import httpx

from foveate.apps.cli.common import free_port
from foveate.apps.serve import server


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@contextmanager
def serving():
    port, ready = free_port("127.0.0.1", 0), threading.Event()
    one = server.Server(hello, "127.0.0.1", port, ready.set)
    thread = threading.Thread(target=one.run)
    thread.start()
    assert ready.wait(20)
    try:
        yield port
    finally:
        one.should_exit = True
        thread.join()


def closed(connection, seconds):
    connection.settimeout(seconds)
    try:
        return not connection.recv(1000)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_header_that_does_not_arrive_closes_its_connection(monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    with serving() as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        begun = time.monotonic()
        for each in slow:
            each.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert client.get("/").text == "hi"
        again = socket.create_connection(("127.0.0.1", port))
        again.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HT")  # the second header is incomplete
        again.settimeout(20)
        assert again.makefile("rb").read().endswith(b"hi")  # up to the end of the connection
        assert all(closed(each, 20) for each in slow)
        assert time.monotonic() - begun < 10
        for each in [*slow, again]:
            each.close()


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
    with serving() as port:
        first, second = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
        third = socket.create_connection(("127.0.0.1", port))
        assert closed(third, 20)
        assert not closed(second, 0.1)
        first.close()
        with httpx.Client() as client:
            for left in reversed(range(50)):  # the server notices a closed connection some time later
                try:
                    assert client.get(f"http://127.0.0.1:{port}").text == "hi"
                    break
                except httpx.TransportError:
                    assert left
                    time.sleep(0.1)
        for each in (second, third):
            each.close()
