"""Conformance checks for metadata builders and attention backends. They raise one error that lists all violations."""

from bateleur.metadata.conformance.backend_checks import BackendReport, check_backend
from bateleur.metadata.conformance.builder_checks import BuilderReport, check_builder
from bateleur.metadata.conformance.errors import ConformanceError, Violation

__all__ = ["BackendReport", "BuilderReport", "ConformanceError", "Violation", "check_backend", "check_builder"]
