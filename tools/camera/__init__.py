"""Pictures for a line from folders, videos, cameras and the renderer (docs/cameras.md), through coserve_client."""

import os

# OpenCV reads these when it is first imported: our own messages say what went wrong.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
os.environ.setdefault("OPENCV_LOG_LEVEL", "OFF")
