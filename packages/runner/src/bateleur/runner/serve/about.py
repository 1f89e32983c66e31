"""Endpoints about the server: models, LoRA adapters, health, version, metrics and the web page."""

import re
from base64 import b64encode
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from bateleur.runner.serve import metrics
from bateleur.runner.serve.body import openapi_model, read_model
from bateleur.runner.serve.errors import http_error, http_errors
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.service import Service
from bateleur.runner.utils.version import package_version


class UnloadBody(BaseModel):
    """Body of a request to unload a LoRA adapter."""

    lora_name: str


class LoadBody(UnloadBody):
    """Body of a request to load a LoRA adapter."""

    lora_path: str
    load_inplace: Literal[False] = False


def router(service: Service) -> APIRouter:
    """Create the routes `/`, `/v1/models`, `/health`, `/ping`, `/version` and `/metrics`, and those of adapters."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        names = (*service.names, *service.adapters)
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONText({"object": "list", "data": [_model(service, name) for name in names], **ends})

    @routes.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        service.adapter_of(name)
        return JSONText(_model(service, name))

    @routes.get("/health")
    @routes.get("/ping")
    @routes.post("/ping")
    async def health(request: Request) -> Response:
        if (error := service.llm.error) is not None:
            raise http_error(503, f"the engine died of {type(error).__name__}: {error}", code="engine_dead")
        return Response(status_code=200)

    @routes.get("/version")
    async def version(request: Request) -> Response:
        return JSONText({"version": package_version()})

    @routes.get("/metrics")
    async def prometheus_metrics(request: Request) -> Response:
        return Response(await service.metrics(), media_type=metrics.CONTENT_TYPE)

    @routes.get("/")
    async def index(request: Request) -> Response:
        html, policy = web_page()
        return HTMLResponse(html, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})

    _add_adapters(routes, service)
    for route in list(routes.routes):
        if isinstance(route, APIRoute) and route.methods is not None and "GET" in route.methods:
            # HTTP requires HEAD wherever GET works, and health checks use it.
            routes.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    return routes


def _add_adapters(routes: APIRouter, service: Service) -> None:
    """Add the routes that load and unload LoRA adapters; the paths are vLLM's."""

    @routes.post("/v1/load_lora_adapter", openapi_extra=openapi_model(LoadBody))
    async def load(request: Request) -> Response:
        """Load a LoRA adapter from a folder of the server; requests choose it by its name as `model`."""
        body = await read_model(request, service.config, LoadBody)
        with http_errors():
            await service.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", openapi_extra=openapi_model(UnloadBody))
    async def unload(request: Request) -> Response:
        """Unload a LoRA adapter that no unfinished request uses."""
        body = await read_model(request, service.config, UnloadBody)
        with http_errors():
            await service.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@cache
def web_page() -> tuple[bytes, str]:
    """Return the web page, and the Content-Security-Policy that allows only its own script, style and server."""
    html, allowed = files("bateleur.runner.serve").joinpath("page.html").read_bytes(), []
    for tag in ("script", "style"):
        texts: list[bytes] = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), html, re.DOTALL)
        hashes = (f"'sha256-{b64encode(sha256(each).digest()).decode()}'" for each in texts)
        allowed.append(f"{tag}-src {' '.join(hashes)}")
    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return html, "; ".join(["default-src 'none'", *allowed, rest])


def _model(service: Service, name: str) -> dict[str, Any]:
    """Return a model as `/v1/models` lists it: fields of OpenAI, vLLM (from `root` on), Anthropic (from `type` on)."""
    adapter = service.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "bateleur",
        "root": service.names[0] if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else service.names[0],
        "max_model_len": service.llm.llm.limits.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": f"{datetime.fromtimestamp(service.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
    }
