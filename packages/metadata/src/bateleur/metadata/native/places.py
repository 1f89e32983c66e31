"""Positions and slots of a step's tokens, and what is new in its tables, in C, on a CPU with a compiler: `places.c`."""

from __future__ import annotations

from bateleur.metadata.native import finder

kernel = finder(
    __file__,
    {
        "places.c": {
            "place_rows": "=" + "pll" + "pppl" + "pp",
            "stage_rows": "=" + "pppplp",
            "follow_cells": "=" + "pppl" + "plp",
        }
    },
)
