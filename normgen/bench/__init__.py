"""Measuring the kernels of a spec against a copy, torch and other libraries.

`cases` (what is measured, and its bytes), `report` (rows, JSON, CSV), `tables` and `plots` need no torch. `run`
measures times on a CUDA GPU, `accuracy` errors; what else there is serves these two. The command line imports `cases`.
"""
