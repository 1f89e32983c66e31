"""Triton forms of the functions of `bateleur.eagle`. Importing its modules imports Triton; importing this does not."""
