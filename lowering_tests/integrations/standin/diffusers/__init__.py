"""The part of diffusers that fp4_inductor.integrations.diffusers meets, in the order of diffusers 0.42: CI has no diffusers.

Used only if diffusers is not installed; what is written against it has been run with diffusers itself.
"""

__version__ = "0.42.1"
