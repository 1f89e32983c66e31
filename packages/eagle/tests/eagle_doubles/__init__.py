"""Doubles that tests of drafters, rules and engines share: their laws, or what they propose, are known."""
