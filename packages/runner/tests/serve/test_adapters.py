"""LoRA adapters over HTTP: requests name them as their model, and they come and go while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora_files import modules_of, write_adapter

from bateleur.runner import AsyncLLM, LoRARequest, SamplingParams
from bateleur.runner.assets import shipped_model
from bateleur.runner.cli import serve
from bateleur.runner.cli.options import build_parser
from bateleur.runner.serve.app import build_app
from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.service import Service

BODY = {"prompt": "def f(", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters of the shipped model."""
    place, modules = tmp_path_factory.mktemp("adapters"), modules_of(shipped_model())
    return {
        name: str(write_adapter(place / name, shipped_model(), modules, seed=seed))
        for seed, name in enumerate(("one", "two"))
    }


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """The shipped model with one slot."""
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4}
    llm = AsyncLLM(device="cpu", dtype="float32", enable_lora=True, enable_prefix_caching=True, **sizes)
    yield llm
    asyncio.run(llm.close())


def test_adapters_come_and_go(llm: AsyncLLM, folders: dict[str, str], client_of: Any, tmp_path: Path) -> None:
    config = ServeConfig(
        served_model_name=["base"], lora_modules=[f"one={folders['one']}"], chat_template="{{ messages[0].content }}"
    )
    client = client_of(build_app(llm, config))
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    def text(model: str) -> str:
        reply = client.ask("/v1/completions", BODY | {"model": model}).json()
        assert reply["model"] == model
        return str(reply["choices"][0]["text"])

    base, one = text("base"), text("one")
    two = {"lora_name": "two", "lora_path": folders["two"]}
    assert client.error(404, "/v1/completions", BODY | {"model": "two"})["code"] == "model_not_found"
    assert client.ask(load, two).text == "Success: LoRA adapter 'two' added successfully."
    assert len({base, one, text("two")}) == 3
    assert (text("base"), text("one")) == (base, one)
    told = {each["id"]: (each["root"], each["parent"]) for each in client.ask("/v1/models").json()["data"]}
    assert told == {"base": ("base", None), "one": (folders["one"], "base"), "two": (folders["two"], "base")}
    chunks = client.stream("/v1/completions", BODY | {"model": "one"})
    assert "".join(each["choices"][0]["text"] for each in chunks) == one
    assert {each["model"] for each in chunks} == {"one"}
    said = {"messages": [{"role": "user", "content": BODY["prompt"]}], **BODY}
    del said["prompt"]
    replies = [client.ask("/v1/chat/completions", said | {"model": name}).json() for name in ("base", "one")]
    assert [reply["model"] for reply in replies] == ["base", "one"]
    assert replies[0]["choices"] != replies[1]["choices"]
    for path, body in (("/v1/messages", said), ("/v1/responses", {"input": "x", "max_output_tokens": 2})):
        assert client.ask(path, body | {"model": "two"}).json()["model"] == "two"

    assert "unload the other adapter first" in client.error(400, load, two)["message"]
    assert "must hold" in client.error(400, load, {"lora_name": "three", "lora_path": str(tmp_path)})["message"]
    assert client.error(400, load, {"lora_name": "three"})["code"] == "missing_required_parameter"
    assert client.error(404, unload, {"lora_name": "three"})["code"] == "model_not_found"
    asyncio.run(while_one_runs(llm, folders, client))
    assert text("two")
    assert client.ask(unload, {"lora_name": "two"}).text == "Success: LoRA adapter 'two' removed successfully."
    assert client.error(404, "/v1/completions", BODY | {"model": "two"})["code"] == "model_not_found"
    assert client.ask(load, {"lora_name": "two", "lora_path": folders["one"]}).status_code == 200
    assert text("two") == one


async def while_one_runs(llm: AsyncLLM, folders: dict[str, str], client: Any) -> None:
    """A request for another adapter waits for its slot; loading another one is refused, and unloading its own."""
    params = SamplingParams(max_tokens=240, ignore_eos=True)
    reader = await llm.submit(["def"], params, lora_request=LoRARequest("one", lora_path=folders["one"]))
    waits = asyncio.create_task(asyncio.to_thread(client.ask, "/v1/completions", BODY | {"model": "two"}))
    try:
        while not (await llm.get_metrics()).num_waiting:
            await asyncio.sleep(0.01)
        for path, body, status in (
            ("/v1/load_lora_adapter", {"lora_name": "three", "lora_path": folders["two"]}, 429),
            ("/v1/unload_lora_adapter", {"lora_name": "one"}, 400),
        ):
            await asyncio.to_thread(client.error, status, path, body)
        assert not waits.done()
    finally:
        llm.abort_unfinished(reader)
    assert (await waits).status_code == 200
    while llm.num_unfinished:
        await asyncio.sleep(0.01)


def test_a_name_is_taken_while_its_adapter_is_loaded(
    llm: AsyncLLM, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second load of the name is refused, and does not replace the first adapter, whenever it arrives."""
    service, loaded = Service(llm, ServeConfig(served_model_name=["base"])), asyncio.Event()
    add = llm.add_lora

    async def slowly(adapter: LoRARequest) -> None:
        await add(adapter)
        loaded.set()
        await asyncio.sleep(0.1)

    async def second() -> None:
        await loaded.wait()
        await service.load_adapter("new", folders["two"])

    async def both() -> list[Any]:
        first = service.load_adapter("new", folders["one"])
        results = await asyncio.gather(first, second(), return_exceptions=True)
        held = await llm.list_loras()
        await service.unload_adapter("new")
        return [*results, held["new"]]

    monkeypatch.setattr(llm, "add_lora", slowly)
    none, refusal, folder = asyncio.run(both())
    assert none is None
    assert "unload the other adapter first" in str(refusal)
    assert folder == Path(folders["one"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--lora-modules a=b", "lora_modules is .*; it must be left out without enable_lora"),
        ("--enable-lora --lora-modules a", r"lora_modules\[0\] is 'a'; it must be NAME=FOLDER"),
        ("--enable-lora --replicas 2", "enable_lora is True; it must be false with replicas"),
    ],
)
def test_flags_that_do_not_fit_are_refused(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        serve.run(build_parser().parse_args(["serve", *line.split()]))


def test_names_are_of_one_model(llm: AsyncLLM) -> None:
    for names in (["a", "a"], ["base"]):
        config = ServeConfig(served_model_name=["base"], lora_modules=[f"{name}=." for name in names])
        with pytest.raises(ValueError, match=f"lora_name is '{names[0]}'; it must be a name that no other"):
            build_app(llm, config)


def test_modules_are_pairs_or_objects() -> None:
    wanted = (("a", "b=c"), ("d", "e"))
    config = ServeConfig(lora_modules=["a=b=c", '{"name": "d", "path": "e", "base_model_name": "f"}'])
    assert config.lora_modules == wanted
    assert ServeConfig(lora_modules=config.lora_modules).lora_modules == wanted
