"""normgen: a compiler from small YAML specs to specialised Triton normalisation kernels."""

__version__ = "0.1.0"
