"""Provide what policy.py builds on. README.md lists which models work and how to use them."""
import logging

# bitsandbytes warns about optional kernels as it loads, so this must come before its import
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
