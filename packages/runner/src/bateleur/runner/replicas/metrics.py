"""What several replicas tell Prometheus, as one text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def merged(texts: Mapping[str, str]) -> bytes:
    """Every family once, its samples with the label `replica`."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(texts))
    return generate_latest(registry)


class _Collector:
    """Families of all replicas."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """Every family, in the order of the first replica that has it."""
        from prometheus_client.parser import text_string_to_metric_families

        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                whole = families.setdefault(family.name, family)
                samples = [
                    each._replace(labels={**each.labels, "replica": replica}) for each in family.samples
                ]
                whole.samples = [*(whole.samples if whole is not family else ()), *samples]
        yield from families.values()
