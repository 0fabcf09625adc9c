"""How the verbs run on a GPU. The only package that imports Triton; ops imports it when a plan says so.

Each kernel takes its constants from formats/ and rotation.py and gives the reference's bytes.
"""
