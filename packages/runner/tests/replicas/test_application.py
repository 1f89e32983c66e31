"""What an application on Ray Serve is made of, without a Ray."""

from __future__ import annotations

import importlib
import signal
import warnings
from importlib.util import find_spec
from typing import Any

import pytest

from bateleur.runner.cli import main
from bateleur.runner.serve.address import bound_socket
from bateleur.runner.serve.config import ServeConfig

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="bateleur-runner[ray] is not installed")


@pytest.fixture(scope="module")
def application() -> Any:
    """The module, which takes seconds to import; what Ray has to say of pydantic meanwhile is Ray's affair."""
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module("bateleur.runner.replicas.application")


def deployments(application: Any, **args: Any) -> tuple[Any, Any]:
    """The front's and the engine's."""
    front = application.app(args)._bound_deployment
    return front, front.init_args[0]._bound_deployment


@needs_ray
def test_arguments_may_be_text_as_a_command_line_has_them(application: Any) -> None:
    front, engine = deployments(
        application, replicas="2", max_model_len="256", api_key='["secret"]', served_model_name="eagle", num_threads="2"
    )
    assert (front.num_replicas, engine.num_replicas) == (1, 2)
    assert engine.ray_actor_options["num_cpus"] == 2
    options, behind, threads = engine.init_args
    drafts = {"draft": "auto", "draft_policy": "auto"}
    assert options == drafts | {"enable_prefix_caching": True, "max_model_len": 256}
    assert (behind.api_key, behind.served_model_name, threads) == ((), ("eagle",), 2)
    assert front.init_args[1].api_key == ("secret",)


@needs_ray
def test_replicas_may_grow_in_number(application: Any) -> None:
    front, engine = deployments(application, replicas=2, max_replicas=40, max_num_seqs=8, downscale_delay=60)
    scaling = engine._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 40, 8)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (30, 60)
    assert engine._deployment_config.max_ongoing_requests > 2 * 8
    assert front.num_replicas == 3
    router = engine._deployment_config.request_router_config
    assert router.request_router_class.endswith("PrefixRouter")
    assert router.request_router_kwargs == {"imbalance": 0.25, "slack": 2.0}


@needs_ray
@pytest.mark.parametrize(
    ("engine", "num_gpus", "resources"),
    [
        ({}, 0, {"CPU": 1.0}),
        ({"tensor_parallel_size": 2}, 0, {"CPU": 2.0}),
        ({}, 8, {"CPU": 1.0, "GPU": 1.0}),
        ({"device": "cpu", "tensor_parallel_size": 2}, 8, {"CPU": 2.0}),
        ({"tensor_parallel_size": 4}, 8, {"CPU": 1.0, "GPU": 4.0}),
        ({"device": "cuda"}, 0, {"CPU": 1.0, "GPU": 1.0}),
    ],
)
def test_ranks_of_a_replica_have_their_devices(
    application: Any, engine: dict[str, Any], num_gpus: int, resources: dict[str, float]
) -> None:
    assert application.DeploymentPlan(engine=engine).resources(num_gpus) == resources


@needs_ray
@pytest.mark.parametrize(("ranks", "bundles"), [(1, None), (4, [{"CPU": 1.0, "GPU": 4.0}])])
def test_devices_of_a_replica_are_one_bundle(
    application: Any, ranks: int, bundles: list[dict[str, float]] | None
) -> None:
    """Its ranks are children of the actor, so a bundle each would leave them without."""
    _, engine = deployments(application, device="cuda", tensor_parallel_size=ranks)
    assert engine._replica_config.placement_group_bundles == bundles
    assert engine._replica_config.placement_group_strategy == (bundles and "STRICT_PACK")
    assert engine.ray_actor_options == {"num_cpus": 1, "num_gpus": ranks}


@needs_ray
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"replica": 2}, "replica is no argument of LLM"),
        ({"replicas": "none"}, "replicas is 'none'"),
        ({"num_threads": "0"}, "num_threads is 0"),
        ({"port": 8001}, "port is 8001; it must be left out"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"enable_lora": True, "replicas": 2}, "enable_lora is True; it must be false with replicas"),
        ({"lora_modules": ["a=x"]}, "lora_modules is .*; it must be left out without enable_lora"),
        ({"num_threads": "two"}, "num_threads is 'two'; it must be"),
    ],
)
def test_wrong_arguments_are_told_before_anything_starts(application: Any, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        application.app(args)


def test_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    assert main(["serve", "--replicas", "2", "--timeout-write", "5"]) == 2
    assert "timeout_write is 5.0; it must be left out with replicas" in capsys.readouterr().err
    assert main(["serve", "--replicas", "3", "--max-replicas", "2"]) == 2
    assert "at least replicas = 3" in capsys.readouterr().err
    monkeypatch.setattr("bateleur.runner.cli.options.find_spec", lambda name: None if name == "ray" else name)
    assert main(["serve", "--replicas", "2"]) == 2
    assert "pip install 'bateleur-runner[ray]'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def server(application: Any) -> Any:
    """The module that starts a Ray."""
    return importlib.import_module("bateleur.runner.replicas.server")


@needs_ray
def test_an_address_where_nobody_answers_is_told_at_once(server: Any) -> None:
    with bound_socket(ServeConfig(port=0)) as place:
        address = f"127.0.0.1:{place.getsockname()[1]}"  # bound, but nobody listens
        with (
            pytest.raises(ValueError, match=f"ray_address is '{address}'; .* the address of a running Ray cluster"),
            server.ray_cluster(address, 1),
        ):
            pass


@needs_ray
def test_an_interrupt_waits_until_ray_has_started(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends it then: a Ray that is left in the middle leaves processes behind. It is not tried again, either."""
    done = []

    def init(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        done.append("started")
        raise OSError("as a start may end")

    monkeypatch.setattr(server.ray, "init", init)
    monkeypatch.setattr(server.ray, "shutdown", lambda: done.append("ended"))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), server.ray_cluster(None, 1):
        done.append("went on")
    assert done == ["started", "ended"]
    assert signal.getsignal(signal.SIGTERM) is before


@needs_ray
def test_a_signal_ends_what_waits_and_interrupts_what_does_not(server: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    with server._interruptible() as wait:
        wait(lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
