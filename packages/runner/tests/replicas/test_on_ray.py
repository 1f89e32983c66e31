"""Two replicas of two ranks each on a Ray of this machine, as the command starts them: what one takes with it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from threading import Event

import httpx
import psutil
import pytest

ENGINE = "ServeReplica:bateleur:engine"
LONG = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
LOREM = "".join(f"# line {n} of a long file\n" for n in range(30))


class Server:
    """A server in a process of its own, with Ray's below it."""

    def __init__(self) -> None:
        call = [sys.executable, "-m", "bateleur.runner", "serve", "--replicas", "2", "--port", "0"]
        call += [
            "--tensor-parallel-size",
            "2",
            "--draft",
            "none",
            "--num-threads",
            "1",
            "--max-model-len",
            "512",
            "--max-num-seqs",
            "8",
        ]
        call += ["--block-size", "16"]
        self.process = subprocess.Popen(call, stdout=subprocess.PIPE, text=True)
        self.ended = False
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address.startswith("http://127.0.0.1:"), self.address

    def end(self) -> None:
        """In order: a second signal would end it at once."""
        if not self.ended:
            self.ended = True
            self.process.send_signal(signal.SIGTERM)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=120)

    def processes(self, name: str = "") -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in below if name in " ".join(each.cmdline())]

    def metric(self, name: str) -> dict[str, float]:
        """Of the engine, by replica."""
        with self.client() as client:
            text = client.get("/metrics").text
        found = re.findall(rf'^bateleur:{name}{{.*replica="(\w+)"}} (\S+)$', text, re.MULTILINE)
        total: Counter[str] = Counter()
        for replica, value in found:
            total[replica] += float(value)
        return dict(total)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    with server.process:
        below = server.processes()
        yield server
        below += server.processes()
        server.end()
        assert server.process.wait(120) == 0
        gone, left = psutil.wait_procs(below, timeout=20)
        assert len(gone) > 5
        assert not left


def eventually(holds: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def it_answers_as_one_server_does(server: Server) -> None:
    """What routes say is tested in one process; here is what Ray's HTTP may change."""
    with server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "bateleur"
        body = {"prompt": "def f(", "max_tokens": 5, "temperature": 0}
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        refused = client.post("/v1/completions", json=body | {"max_tokens": 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        missing = client.get("/nothing")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole


def requests_go_where_their_prefix_is(server: Server) -> None:
    before = server.metric("prefix_cache_hits_total")
    with server.client() as client:
        for number in range(4):
            body = {"prompt": f"{LOREM}# {number}\n", "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 200
    hits = {name: count - before[name] for name, count in server.metric("prefix_cache_hits_total").items()}
    assert sorted(count > 0 for count in hits.values()) == [False, True]
    assert max(hits.values()) > 3 * len(LOREM) / 16


def a_client_that_hangs_up_is_aborted(server: Server, stream: bool) -> None:
    before = _aborted(server)
    with server.client() as client:
        body = {"prompt": "def f(", **LONG, "stream": stream}
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as reply:
                assert next(reply.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=0.5)
    eventually(lambda: _aborted(server) == before + 1)
    assert sum(server.metric("num_requests_running").values()) == 0


def _aborted(server: Server) -> float:
    with server.client() as client:
        text = client.get("/metrics").text
    found = re.findall(r'^bateleur:request_success_total{finished_reason="abort".*} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


def streamed(server: Server, prompt: str, began: Event) -> list[str]:
    """The events, of which the first sets `began`."""
    events = []
    with server.client() as client:
        body = {"prompt": prompt, **LONG, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                if line:
                    began.set()
                    events.append(line.removeprefix("data: "))
    return events


def whole(server: Server, prompt: str) -> str:
    with server.client() as client:
        reply = client.post("/v1/completions", json={"prompt": prompt, **LONG})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])


def a_killed_replica_loses_no_request_that_had_not_begun_to_stream(server: Server) -> None:
    prompts = [f"def function_{n}(x):\n    " for n in range(6)]
    victim = server.processes(ENGINE)[0]
    with ThreadPoolExecutor(2 * len(prompts)) as threads:
        began = [Event() for _ in prompts]
        streams: list[Future[list[str]]] = [
            threads.submit(streamed, server, *each) for each in zip(prompts, began, strict=True)
        ]
        assert all(event.wait(60) for event in began)
        wholes = [threads.submit(whole, server, prompt) for prompt in prompts]
        eventually(lambda: sum(server.metric("num_requests_running").values()) == 2 * len(prompts))
        assert min(server.metric("num_requests_running").values()) >= 2
        victim.kill()
        texts = [each.result() for each in wholes]
        lost = 0
        for text, each in zip(texts, streams, strict=True):
            *events, last = each.result()
            told = "".join(json.loads(event)["choices"][0]["text"] for event in events)
            if last == "[DONE]":
                assert told == text
            else:
                lost += 1
                assert json.loads(last)["error"]["code"] == "replica_lost"
                assert text.startswith(told)
    assert 0 < lost < len(prompts)
    eventually(lambda: len(server.metric("num_requests_running")) == 2)
    assert whole(server, prompts[0]) == texts[0]


def what_runs_at_the_end_ends(server: Server) -> None:
    threads = ThreadPoolExecutor(1)
    began = Event()
    stream = threads.submit(streamed, server, "def last(", began)
    assert began.wait(60)
    server.end()
    assert stream.result()[-1] == "[DONE]"
    threads.shutdown()


@pytest.mark.skipif(find_spec("ray") is None, reason="bateleur-runner[ray] is not installed")
def test_two_replicas(server: Server) -> None:
    """One test, since Ray takes long to start, and several would each start one where tests run beside each other."""
    it_answers_as_one_server_does(server)
    requests_go_where_their_prefix_is(server)
    a_client_that_hangs_up_is_aborted(server, stream=True)
    a_client_that_hangs_up_is_aborted(server, stream=False)
    a_killed_replica_loses_no_request_that_had_not_begun_to_stream(server)
    what_runs_at_the_end_ends(server)
