"""The Triton kernels that anyone would write first. They are here to be faster than."""
