"""What is claimed of two CPU cores, beside what one run measured."""

from __future__ import annotations

from performance.results import result, source, table


def claims_section() -> str:
    """The section: a row for each claim."""
    record = result("claims-cpu")
    rows = [
        [
            row["what"],
            row["bound"],
            ", ".join(
                f"{name}: {'**' if name in row['off'] else ''}{figure:.2f}{' (off)**' if name in row['off'] else ''}"
                for name, figure in row["measured"].items()
            )
            or "not measured",
        ]
        for row in record["claims"]
    ]
    says = (
        f"Bounds that must hold on a CPU, checked in one run ({source('claims-cpu')}; {record['machine']}, torch "
        f"{record['torch']}). Figures outside their bound are marked."
    )
    return f"## Claims\n\n{says}\n\n" + table(["what", "bound", "measured"], rows)
