"""Imported before MXNet: hides what MXNet imports only where it finds it, and no case uses. Many processes start."""

import sys

sys.modules.update(dict.fromkeys(["scipy", "sklearn"]))
