"""Three thousand requests, of which many clients hang up at random places: nothing is left, and memory stays flat."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

pytestmark = pytest.mark.slow

psutil = pytest.importorskip("psutil", reason="needs the package psutil")

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
COUNT, AT_ONCE, ROUNDS = 3_000, 24, 5


def start(folder: Path, log: Path) -> tuple[subprocess.Popen[str], str]:
    command = [
        *(sys.executable, "-m", "bateleur.runner", "serve", str(folder), "--port", "0", "--num-threads", "1"),
        *(
            "--device",
            "cpu",
            "--skip-tokenizer-init",
            "--max-num-seqs",
            "32",
            "--max-model-len",
            "64",
            "--block-size",
            "8",
        ),
        *("--enable-prefix-caching", "--kv-cache-memory-bytes", "4000000", "--served-model-name", "tiny"),
    ]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "http://" in line, (line, log.read_text())
    return process, line[line.index("http://") :].split()[0].rstrip("/")


async def client(host: str, port: int, dice: random.Random, count: int) -> dict[str, int]:
    """Ask `count` times in turn; a third hangs up after a random number of bytes."""
    ended = {"whole": 0, "left": 0}
    for _ in range(count):
        prompt = [dice.randrange(1, 90) for _ in range(dice.choice((2, 3, 5, 9, 17)))]
        stream = dice.random() < 0.5
        asked = {"prompt": prompt, "max_tokens": dice.randrange(1, 6), "stream": stream, "ignore_eos": True}
        body = json.dumps(asked).encode()
        head = f"{HEAD}Content-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(head.encode() + body)
            if dice.random() < 1 / 3:
                wanted = dice.choice((0, 0, 1, 200, 600))
                if wanted:
                    await reader.read(wanted)
                ended["left"] += 1
            else:
                reply = await reader.read()
                assert reply.startswith(b"HTTP/1.1 200"), reply
                assert (b"data: [DONE]" in reply) == stream, reply
                ended["whole"] += 1
        finally:
            writer.close()
    return ended


async def crowd(url: str, count: int, seed: int) -> dict[str, int]:
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    calls = [client(address.hostname, address.port, random.Random(seed + i), count // AT_ONCE) for i in range(AT_ONCE)]
    ended = await asyncio.gather(*calls)
    return {name: sum(each[name] for each in ended) for name in ended[0]}


def gauges(url: str) -> dict[str, float]:
    """Metrics without labels but the model's."""
    with urlopen(f"{url}/metrics") as reply:
        lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
    return {line.split("{")[0].removeprefix("bateleur:"): float(line.rsplit(" ", 1)[1]) for line in lines}


def settled(url: str) -> dict[str, float]:
    """The metrics when nothing runs any more."""
    for _ in range(100):
        now = gauges(url)
        if not now["num_requests_running"] and not now["num_requests_waiting"]:
            return now
        time.sleep(0.1)
    raise AssertionError(now)


def test_nothing_is_left_of_three_thousand_requests(tmp_path: Path) -> None:
    tiny = import_module("tiny")
    folder = tiny.save(tiny.make_model("nemotron_h"), tmp_path / "model")
    process, url = start(folder, tmp_path / "log")
    try:
        server, resident, open_files = psutil.Process(process.pid), [], []
        ended = {"whole": 0, "left": 0}
        for index in range(ROUNDS):
            for name, count in asyncio.run(crowd(url, COUNT // ROUNDS, 100 * index)).items():
                ended[name] += count
            assert settled(url)["kv_cache_usage_perc"] == 0
            resident.append(server.memory_info().rss)
            open_files.append(server.num_fds())
        assert min(ended.values()) > COUNT / 4
        assert sum(ended.values()) > 0.99 * COUNT
        # The first round fills pools and caches of allocators; four times as many requests add nothing.
        assert resident[-1] - resident[0] < 5e6, resident
        assert max(open_files) - min(open_files) < 10, open_files
        assert server.num_threads() < 64
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0, (tmp_path / "log").read_text()
