.DEFAULT_GOAL := help
.PHONY: help install docs figures format lint typecheck test bench model draft all

help: ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-10s %s\n", $$1, $$2}'

install: ## Install the workspace into .venv, exactly as locked
	uv sync --locked

docs: ## Build the docs site in site/; a broken link is an error
	uv run --isolated --only-group docs mkdocs build --strict

format: ## Format and apply safe lint fixes
	uv run ruff format .
	uv run ruff check --fix .

lint: ## Check format and lint
	uv run ruff format --check .
	uv run ruff check .

figures: ## Make docs/performance.md, docs/scaling.md and docs/pictures of benchmarks/results
	uv run python tools/pictures.py
	uv run python tools/performance_page.py > docs/performance.md
	uv run python tools/scaling_page.py > docs/scaling.md

typecheck: ## mypy --strict
	uv run mypy

test: ## All tests: the fast ones, then the slow ones (GPU tests run where there is a GPU)
	uv run pytest
	uv run pytest -m slow

bench: ## Throughput beside transformers, and host time per step
	uv run python benchmarks/throughput.py

model: ## Train the shipped model again (about an hour on two cores)
	uv run python tools/train_model.py --out packages/runner/src/bateleur/runner/assets/model

draft: ## Train the shipped draft head again (about an hour and a half on two cores)
	uv run python tools/train_draft.py --out packages/runner/src/bateleur/runner/assets/draft

all: ## What CI runs
	.ci/run
