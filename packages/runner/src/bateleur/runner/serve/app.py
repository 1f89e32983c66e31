"""The ASGI application with all endpoints."""

from fastapi import FastAPI

from bateleur.runner.async_llm import AsyncLLM
from bateleur.runner.serve import about, messages, tokens
from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.middleware import add_middleware
from bateleur.runner.serve.openai import routes as openai
from bateleur.runner.serve.responses import routes as responses
from bateleur.runner.serve.service import Service
from bateleur.runner.utils.version import package_version


def build_app(llm: AsyncLLM, config: ServeConfig | None = None) -> FastAPI:
    """Create the ASGI application. The caller closes `llm`. `app.state.service` is the `Service` of the endpoints."""
    service = Service(llm, config or ServeConfig())
    documents = not service.config.disable_fastapi_docs
    app = FastAPI(
        title="bateleur",
        version=package_version(),
        docs_url="/docs" if documents else None,
        redoc_url=None,
        openapi_url="/openapi.json" if documents else None,
        redirect_slashes=False,
    )
    app.state.service = service
    for endpoints in (about, openai, messages, responses, tokens):
        app.include_router(endpoints.router(service))
    add_middleware(app, service.config, lambda: service.stopping)
    return app
