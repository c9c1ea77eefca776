"""Pictures for a line: folders, watched folders, videos, cameras, rendered boards (docs/cameras.md).

Publishes through coserve_client, and knows nothing of the daemon but its endpoints.
"""

import os

# OpenCV reads these when it is first imported: our own messages say what went wrong.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
os.environ.setdefault("OPENCV_LOG_LEVEL", "OFF")
