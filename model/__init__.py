"""What policy.py builds on, see README.md."""
import logging

# before anything imports bitsandbytes, which warns of optional kernels as it loads
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
