"""Endpoints that load and unload LoRA adapters."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel

from bateleur.runner.serve.body import openapi_model, read_json_object, validate
from bateleur.runner.serve.errors import http_errors
from bateleur.runner.serve.service import Service


class LoadBody(BaseModel):
    """Body of a request to load a LoRA adapter."""

    lora_name: str
    lora_path: str
    load_inplace: Literal[False] = False


class UnloadBody(BaseModel):
    """Body of a request to unload a LoRA adapter."""

    lora_name: str


def router(service: Service) -> APIRouter:
    """Create the routes; the paths are vLLM's."""
    routes = APIRouter()

    @routes.post("/v1/load_lora_adapter", openapi_extra=openapi_model(LoadBody))
    async def load(request: Request) -> Response:
        """Load a LoRA adapter from a folder of the server; requests choose it by its name as `model`."""
        value = await read_json_object(request, service.config)
        with http_errors():
            body = validate(LoadBody, value)
            await service.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", openapi_extra=openapi_model(UnloadBody))
    async def unload(request: Request) -> Response:
        """Unload a LoRA adapter that no unfinished request uses."""
        value = await read_json_object(request, service.config)
        with http_errors():
            body = validate(UnloadBody, value)
            await service.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes
