"""Checks that anybody's builder or backend can be put to: they raise with everything that is wrong, or report."""

from bateleur.metadata.conformance.backend_checks import BackendReport, check_backend
from bateleur.metadata.conformance.builder_checks import BuilderReport, check_builder
from bateleur.metadata.conformance.errors import ConformanceError, Violation

__all__ = [
    "BackendReport",
    "BuilderReport",
    "ConformanceError",
    "Violation",
    "check_backend",
    "check_builder",
]
