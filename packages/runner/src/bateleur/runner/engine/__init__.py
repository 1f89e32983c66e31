"""The engine: scheduling and running of whole steps, inputs, outputs and setup."""
